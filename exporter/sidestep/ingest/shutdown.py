"""What ends a process that serves: a signal, or a bug in what the event loop calls."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

from sidestep.errors import RunError

log = logging.getLogger(__name__)


class Ending:
    """Watches for the end of this process, in the running event loop.

    Attributes:
        stop: Set when it is time to end.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self._bugs: list[BaseException] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop.set)

    def check(self) -> None:
        """Whether it ended as it should.

        Raises:
            RunError: A bug outside of one item's or one request's handling; better to be
                started again than to go on with what stands still.
        """
        if self._bugs:
            raise RunError(f"stopped by a bug: {self._bugs[0]!r}; please report it with the log")

    def _on_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        log.error("%s", context.get("message"), exc_info=error)
        # Only a callback of the loop has a handle; the rest are connections that broke.
        if error is not None and "handle" in context:
            self._bugs.append(error)
            self.stop.set()
