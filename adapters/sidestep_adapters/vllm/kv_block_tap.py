"""Sampled KV blocks, as vLLM's block pool tells of them; needs no vLLM itself.

Takes the place of vLLM's own collector, whose calls it understands. A block that is
not sampled costs the test of one integer at its birth, a look into a set later.
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
    """One block pool's collector. Its calls come from inside the scheduler's step.

    It samples nothing until ``flush`` is told a rate.

    Attributes:
        renew: Set by another thread: events were dropped, follow other blocks from now on.
    """

    def __init__(self, push: Callable[[BlockEvents], None]) -> None:
        self._push = push
        self._source = secrets.randbits(40)
        self._sampled: set[int] = set()
        self.renew = False
        self._births = 0
        self._begin()
        self._sample(0.0)

    def on_block_allocated(self, block: Any) -> None:
        """A block was handed out; its number and birth decide whether it is followed."""
        self._births = births = self._births + 1
        if hash((block.block_id, births)) % _SPACE < self._threshold:
            self._sampled.add(block.block_id)
            self._note(ALLOCATED, block.block_id)

    def on_block_accessed(self, block: Any) -> None:
        """A block's content served another request."""
        if block.block_id in self._sampled:
            self._note(TOUCHED, block.block_id)

    def on_block_evicted(self, block: Any) -> None:
        """A block is handed out again, or lost its content."""
        if block.block_id in self._sampled:
            self._sampled.discard(block.block_id)
            self._note(EVICTED, block.block_id)

    def reset(self) -> None:
        """The whole cache was emptied."""
        self._sampled.clear()
        self._note(RESET, 0)

    def flush(self, rate: float) -> None:
        """Push what happened since the last time, and sample at ``rate`` from now on."""
        kinds, blocks, stamps = self._kinds, self._blocks, self._stamps
        source, old = self._source, self._rate
        if self.renew:
            # What was dropped may have been the end of any life: begin anew.
            self.renew = False
            self._source = secrets.randbits(40)
            self._sampled.clear()
        if rate != old:
            self._sample(rate)
        if not kinds:
            return
        self._begin()
        for start in range(0, len(kinds), MAX_OBSERVATIONS):
            part = slice(start, start + MAX_OBSERVATIONS)
            told = (bytes(kinds[part]), blocks[part], stamps[part])
            self._push(BlockEvents(0, _monotonic(), source, old, *told))

    def _begin(self) -> None:
        self._kinds = bytearray()
        self._blocks: list[int] = []
        self._stamps: list[float] = []

    def _sample(self, rate: float) -> None:
        self._rate = rate
        self._threshold = int(rate * _SPACE)

    def _note(self, kind: int, block: int) -> None:
        self._kinds.append(kind)
        self._blocks.append(block)
        self._stamps.append(_monotonic())
