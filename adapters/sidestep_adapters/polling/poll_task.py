"""The asyncio task behind a source that polls a server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class PollTask:
    """Runs one coroutine from the source's ``open`` to its ``close``."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, polls: Coroutine[Any, Any, None]) -> None:
        """Start ``polls``, in the running event loop."""
        self._task = asyncio.create_task(polls)
        # An exception is a bug: raising it here ends the process.
        self._task.add_done_callback(lambda task: None if task.cancelled() else task.result())

    def cancel(self) -> None:
        """Cancel the task, if it was started."""
        if self._task is not None:
            self._task.cancel()

    async def wait(self) -> None:
        """Wait until the task has ended and closed its connection."""
        if self._task is not None:
            await asyncio.wait((self._task,))
