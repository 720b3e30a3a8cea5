"""The exporter's event loop: uvloop's where uvloop is installed, and what ends it.

SIGTERM lets the process linger for a last scrape; SIGINT, a second signal or a bug does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from sidestep.errors import RunError

try:
    import uvloop
except ImportError:
    NAME = "asyncio"
else:
    NAME = "uvloop"


log = logging.getLogger(__name__)

CHECK = 0.05
"""Seconds between checks of a lingering process."""


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` until it ends."""
    if NAME == "uvloop":
        uvloop.run(main)
    else:
        asyncio.run(main)


class Shutdown:
    """Shutdown conditions of this process, in the running event loop."""

    def __init__(self) -> None:
        self.stop, self.at_once = asyncio.Event(), asyncio.Event()
        self._bugs: list[BaseException] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    async def linger(self, seconds: float, done: Callable[[], bool]) -> None:
        """Return once ``done()`` is true or another signal arrives, or after ``seconds``."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not done() and asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(asyncio.TimeoutError):  # not yet the builtin in 3.10
                await asyncio.wait_for(self.at_once.wait(), CHECK)
                return

    def check(self) -> None:
        """Raise the error that stopped the process, if any.

        Raises:
            RunError: A bug outside the handling of one item or request; restarting is better
                than continuing with a stalled part.
        """
        if self._bugs:
            raise RunError(f"stopped by a bug: {self._bugs[0]!r}; please report it with the log")

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGINT or self.stop.is_set():
            self.at_once.set()
        self.stop.set()

    def _on_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        log.error("%s", context.get("message"), exc_info=error)
        # Only a callback of the loop has a handle; other contexts are broken connections.
        if error is not None and "handle" in context:
            self._bugs.append(error)
            self.at_once.set()
            self.stop.set()
