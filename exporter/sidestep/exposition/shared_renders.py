"""Renders that concurrent and closely following requests share."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from sidestep.exposition.compression import Body

Key = TypeVar("Key", bound=Hashable)


class SharedRenders(Generic[Key]):
    """Renders by key, in flight or finished a moment ago.

    Args:
        seconds: How long a rendered body answers further requests.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._renders: dict[Key, asyncio.Task[Body]] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._renders)

    async def get(self, key: Key, render: Callable[[], Coroutine[Any, Any, Body]]) -> Body:
        """Return the body of ``key``, from ``render`` if there is none."""
        task = self._renders.get(key)
        if task is None:
            task = self._renders[key] = asyncio.create_task(render())
            task.add_done_callback(functools.partial(self._expire, key))
        # A client that disconnects must not cancel the render that others wait for.
        return await asyncio.shield(task)

    def _expire(self, key: Key, task: asyncio.Task[Body]) -> None:
        """Drop a body once it is too old, and a failed render at once."""
        if task.cancelled() or task.exception() is not None:
            del self._renders[key]
        else:
            task.get_loop().call_later(self._seconds, self._renders.pop, key)
