"""Reassembly of records that are too large for one frame."""

from __future__ import annotations

import dataclasses

from sidestep.federation.messages import Forward, Order, order_of

MAX_BYTES = 32 << 20
"""Maximum bytes of all buffered pieces; the oldest incomplete records are dropped."""
PIECE_COST = 4 << 10
"""Bytes that a piece counts in addition to its data, which may be empty."""

Key = tuple[str, str]
"""Source and engine."""


@dataclasses.dataclass(slots=True)
class _Incomplete:
    order: Order
    wanted: int
    pieces: dict[int, bytes] = dataclasses.field(default_factory=dict)


class Pieces:
    """The newest incomplete record of each source and engine."""

    def __init__(self) -> None:
        self._incomplete: dict[Key, _Incomplete] = {}
        self._bytes = 0

    def add(self, message: Forward) -> bytes | None:
        """Add a piece; return the record that it completes, or None while pieces are missing."""
        key, order = (message.source, message.engine), order_of(message)
        found = self._incomplete.get(key)
        if found is not None and found.order > order:
            return None
        if found is not None and (found.order < order or found.wanted != message.pieces):
            self._drop(key)
            found = None
        if message.pieces == 1:
            return message.data
        if found is None:
            found = self._incomplete[key] = _Incomplete(order, message.pieces)
        if message.piece not in found.pieces:
            found.pieces[message.piece] = message.data
            self._bytes += PIECE_COST + len(message.data)
        if len(found.pieces) == message.pieces:
            self._drop(key)
            return b"".join(piece for _, piece in sorted(found.pieces.items()))
        while self._bytes > MAX_BYTES:
            self._drop(next(iter(self._incomplete)))
        return None

    def _drop(self, key: Key) -> None:
        found = self._incomplete.pop(key)
        self._bytes -= sum(PIECE_COST + len(data) for data in found.pieces.values())
