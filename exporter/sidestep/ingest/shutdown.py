"""Shutdown of a serving process: by a signal, or by a bug in an event loop callback."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

from sidestep.errors import RunError

log = logging.getLogger(__name__)


class Shutdown:
    """Shutdown conditions of this process, in the running event loop.

    Attributes:
        stop: Set when the process should stop.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self._bugs: list[BaseException] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop.set)

    def check(self) -> None:
        """Raise the error that stopped the process, if any.

        Raises:
            RunError: A bug outside the handling of one item or request; restarting is better
                than continuing with a stalled part.
        """
        if self._bugs:
            raise RunError(f"stopped by a bug: {self._bugs[0]!r}; please report it with the log")

    def _on_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        log.error("%s", context.get("message"), exc_info=error)
        # Only a callback of the loop has a handle; other contexts are broken connections.
        if error is not None and "handle" in context:
            self._bugs.append(error)
            self.stop.set()
