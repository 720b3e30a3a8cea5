"""Long work on the event loop, in slices between which others have their turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TypeVar

SLICE = 0.001
"""Seconds after which the loop gets a turn."""
MAX_SLICE = 0.002
"""Seconds for which it is to be held at most: it gets its turn before work that would take longer."""
MIN_SLICE = 0.0005
"""Seconds that it can be held in any case: between two slices there may be turns of milliseconds."""

Item = TypeVar("Item")


async def collect_in_slices(items: Iterable[Item]) -> list[Item]:
    """All ``items``; making one of them should take a fraction of a slice.

    Where some take most of one, any next one is taken for such. One that took longer than all of
    it was interrupted, by the operating system or the collector, and says nothing of the next.
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
