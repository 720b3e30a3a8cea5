"""Long work on the event loop, in slices between which others have their turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TypeVar

SLICE = 0.001
"""Seconds after which the loop gets a turn."""

Item = TypeVar("Item")


async def collected(items: Iterable[Item]) -> list[Item]:
    """All ``items``; making one of them should take a fraction of a slice."""
    found: list[Item] = []
    since = time.perf_counter()
    for item in items:
        found.append(item)
        if time.perf_counter() - since > SLICE:
            await asyncio.sleep(0)
            since = time.perf_counter()
    return found
