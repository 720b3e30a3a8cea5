"""Cooperative work on the event loop: long work in slices, with other tasks between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TypeVar

SLICE = 0.001
"""Seconds after which work yields to the event loop."""
MAX_SLICE = 0.002
"""Seconds that a slice may take: work yields before an item that would probably take longer."""
MIN_SLICE = 0.0005
"""Seconds that a slice may take in any case, as other tasks may run for milliseconds in between."""

Item = TypeVar("Item")


async def collect_in_slices(items: Iterable[Item]) -> list[Item]:
    """Return all ``items``, yielding to the event loop; one item should take a fraction of a slice.

    The longest item so far predicts the next one, within a slice: an item that took longer than a
    whole slice was interrupted by the operating system or the garbage collector.
    """
    found: list[Item] = []
    longest = 0.0
    since = before = time.perf_counter()
    for item in items:
        found.append(item)
        now = time.perf_counter()
        longest = max(longest, now - before)
        if now - since > min(SLICE, max(MAX_SLICE - longest, MIN_SLICE)):
            await asyncio.sleep(0)
            since = now = time.perf_counter()
        before = now
    return found
