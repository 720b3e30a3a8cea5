"""Watch of an event loop from another thread: whether it runs what it is asked to run."""

from __future__ import annotations

import asyncio

PERIOD = 1.0
"""Least seconds between two callbacks; each wakes an idle loop."""
LATE = 1.0
"""Seconds that a callback takes on a loop that does not serve yet."""
CALM = 10.0
"""Seconds without a late callback after which the loop serves: starting a server blocks it."""


class LoopWatch:
    """Asks a loop about once a second to run a callback, in the publisher thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked_at: float | None = None
        self._next = 0.0
        self._calm_since: float | None = None

    def asked_at(self, loop: asyncio.AbstractEventLoop | None, now: float) -> float | None:
        """Return when ``loop`` was asked for the callback that it has not run yet; else None.

        A loop that is not running, or does not serve yet, owes none.
        """
        if loop is not self._loop or loop is None or not loop.is_running():
            self._loop, self._asked_at, self._calm_since = loop, None, None
            return None
        asked_at = self._asked_at
        if asked_at is None:
            self._calm_since = now if self._calm_since is None else self._calm_since
            self._ask(loop, now)
            return None
        if self._calm_since is not None and asked_at - self._calm_since >= CALM:
            return asked_at
        if now - asked_at >= LATE:
            self._calm_since = None
        return None

    def _ask(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        if now < self._next:
            return
        self._next = now + PERIOD
        self._asked_at = now
        try:
            loop.call_soon_threadsafe(self._ran)
        except RuntimeError:
            # It was closed just now.
            self._asked_at = None

    def _ran(self) -> None:
        self._asked_at = None
