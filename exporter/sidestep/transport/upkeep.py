"""When the socket is closed and bound anew: too much memory, too many connections, a lost path."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.listener import Listener
from sidestep.transport.process import lowest_free_descriptor, open_files_limit, trim
from sidestep.transport.watchdog import Watchdog

log = logging.getLogger(__name__)

PAUSE = 1.0
"""Seconds at least between two bindings, and between two looks at the paths. Senders hold what is
not acknowledged, so a pause delays; a longer one lets them, whose attempts to reconnect get
rarer, miss their turn against somebody who fills the memory again at once."""
MAX_DESCRIPTORS = 8192
"""Open at once: connections beyond these are cut, all of them, since libzmq does not tell them apart.
It ends the process where an ipc connection finds no descriptor left, and where a peer has chosen
the routing id that the next peer gets, which takes many connections to hit."""
RETRY = 10.0
"""Seconds until an endpoint that somebody else has by now is tried again: all peers pay."""


class Upkeep:
    """Keeps a listener within its memory and on its paths; ask ``due`` often, then ``act``.

    Args:
        cut: Lets go of what else strangers fill.
    """

    def __init__(
        self,
        listener: Listener,
        watchdog: Watchdog,
        metrics: SelfMetrics,
        cut: Callable[[], None] = lambda: None,
    ) -> None:
        self._listener = listener
        self._watchdog = watchdog
        self._metrics = metrics
        self._cut = cut
        self._reason = ""
        self._least_descriptors = 0
        self._bound_at = self._looked_at = float("-inf")
        metrics.read("sidestep_zap_up", listener.zap_readings)

    def due(self, now: float) -> bool:
        """Whether the listener is to be closed, or opened, by ``act``."""
        if self._listener.socket is None:
            return now >= self._bound_at + PAUSE
        if self.has_too_many():
            return True
        if self._watchdog.must_cut():
            self._reason = "memory"
        elif now >= self._looked_at + PAUSE:
            self._looked_at = now
            wait = RETRY if self._listener.unbound else PAUSE
            if now >= self._bound_at + wait and self._listener.lost:
                self._reason = "stolen"
        return bool(self._reason)

    def has_too_many(self) -> bool:
        """Return whether connections came, and too many files are open now: then call ``act``.

        To be asked as soon as a connection was accepted: peers connect a hundred times in 20 ms.
        """
        if self._listener.has_accepted() and lowest_free_descriptor() >= self._max_descriptors():
            self._reason = "descriptors"
        return bool(self._reason)

    def act(self, now: float) -> None:
        """Close the listener, unless it is, and bind it anew, unless it was a moment ago."""
        if self._reason:
            self._metrics.add("sidestep_rebinds_total", 1, self._reason)
            self._listener.cut()
        if self._reason == "memory":
            self._cut()
            trim()
            self._watchdog.cut()
        elif self._reason == "descriptors":
            self._note_descriptors()
        elif self._reason:
            log.warning("an ingest path is no longer ours: binding it anew")
        self._reason = ""
        if now >= self._bound_at + PAUSE:
            self._bound_at = now
            self._listener.reopen()

    def _max_descriptors(self) -> int:
        return max(min(MAX_DESCRIPTORS, open_files_limit() * 3 // 4), self._least_descriptors)

    def _note_descriptors(self) -> None:
        """Log that connections were cut; where that freed too few descriptors, allow for more."""
        log.warning("over %d files were open: all connections are cut", self._max_descriptors())
        left = lowest_free_descriptor()
        if left >= self._max_descriptors():
            self._least_descriptors = left + (open_files_limit() - left) // 2
            log.error(
                "%d files are open without any connection; raise the limit of open files", left
            )
