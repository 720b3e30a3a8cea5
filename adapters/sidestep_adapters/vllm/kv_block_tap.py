"""Sampled KV block events from vLLM's block pool; needs no vLLM itself.

Replaces vLLM's own collector and has the same methods. A block that is not sampled costs one
integer comparison when it is allocated and a set lookup later.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from sidestep.protocol.block_events import ALLOCATED, EVICTED, RESET, TOUCHED, BlockEvents
from sidestep.protocol.limits import MAX_OBSERVATIONS

_SPACE = 1 << 32
_monotonic = time.monotonic


class BlockTap:
    """Metrics collector of one block pool, called inside the scheduler's step.

    It samples nothing until ``flush`` sets a rate.

    Attributes:
        resample: Set by another thread after events were dropped: sample other blocks.
    """

    def __init__(self, push: Callable[[BlockEvents], None]) -> None:
        self._push = push
        self._source = secrets.randbits(40)
        self._sampled: set[int] = set()
        self.resample = False
        self._allocations = 0
        self._clear_events()
        self._set_rate(0.0)

    def on_block_allocated(self, block: Any) -> None:
        """Decide by block number and allocation count whether to sample an allocated block."""
        self._allocations = allocations = self._allocations + 1
        if hash((block.block_id, allocations)) % _SPACE < self._threshold:
            self._sampled.add(block.block_id)
            self._record(ALLOCATED, block.block_id)

    def on_block_accessed(self, block: Any) -> None:
        """Record that another request used the content of a sampled block."""
        if block.block_id in self._sampled:
            self._record(TOUCHED, block.block_id)

    def on_block_evicted(self, block: Any) -> None:
        """Record that a sampled block was allocated again or lost its content."""
        if block.block_id in self._sampled:
            self._sampled.discard(block.block_id)
            self._record(EVICTED, block.block_id)

    def reset(self) -> None:
        """Record that the whole cache was emptied."""
        self._sampled.clear()
        self._record(RESET, 0)

    def flush(self, rate: float) -> None:
        """Push the events since the previous flush, and sample at ``rate`` from now on."""
        kinds, blocks, stamps = self._kinds, self._blocks, self._stamps
        source, old = self._source, self._rate
        if self.resample:
            # Any sampled block may have ended among the dropped events: sample other blocks.
            self.resample = False
            self._source = secrets.randbits(40)
            self._sampled.clear()
        if rate != old:
            self._set_rate(rate)
        if not kinds:
            return
        self._clear_events()
        for start in range(0, len(kinds), MAX_OBSERVATIONS):
            part = slice(start, start + MAX_OBSERVATIONS)
            columns = (bytes(kinds[part]), blocks[part], stamps[part])
            self._push(BlockEvents(0, _monotonic(), source, old, *columns))

    def _clear_events(self) -> None:
        self._kinds = bytearray()
        self._blocks: list[int] = []
        self._stamps: list[float] = []

    def _set_rate(self, rate: float) -> None:
        self._rate = rate
        self._threshold = int(rate * _SPACE)

    def _record(self, kind: int, block: int) -> None:
        self._kinds.append(kind)
        self._blocks.append(block)
        self._stamps.append(_monotonic())
