"""Rebinding of the socket: at limits of memory and connections, in a flood, or after its path was replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.listener import IngestListener
from sidestep.transport.process import lowest_free_descriptor, open_files_limit, trim
from sidestep.transport.watchdog import Watchdog

log = logging.getLogger(__name__)

PAUSE = 1.0
"""Minimum seconds between two binds, and between two checks of the paths. Senders keep
unacknowledged frames, so a pause only delays them. With a longer pause senders, whose
reconnection attempts back off, would lose against a peer that fills the memory again at once."""
MAX_DESCRIPTORS = 8192
"""Open file descriptors from which all connections are closed; libzmq cannot close a single one.
libzmq aborts the process when an ipc connection finds no descriptor left, and when a peer has
chosen the routing id that the next peer gets, which takes many connections to hit."""
TRIM_INTERVAL = 10.0
"""Seconds between two returns of free memory to the operating system at the soft limit. glibc does not
return what is free below a block in use: a flood of messages left the process at twice its size."""
FLOODED = 5.0
"""Seconds for which messages must have waited without a pause, most of them refused, for all
connections to be closed. libzmq reads without a limit, and what a peer has sent waits although the
peer has left: engines would stand in line behind it for minutes."""
RETRY = 10.0
"""Seconds between attempts to bind an endpoint that another process uses; each attempt closes all
connections."""


class Upkeep:
    """Upkeep of a listener's memory, descriptors and paths: poll ``due``, then call ``act``.

    Args:
        cut: Frees other memory that untrusted peers can fill; returns whether there may be some.
        accepted: Returns the number of messages that were not refused.
    """

    def __init__(
        self,
        listener: IngestListener,
        watchdog: Watchdog,
        metrics: SelfMetrics,
        cut: Callable[[], bool] = lambda: False,
        accepted: Callable[[], int] = lambda: 0,
    ) -> None:
        self._listener = listener
        self._watchdog = watchdog
        self._metrics = metrics
        self._cut = cut
        self._accepted = accepted
        self._received = self._accepted_before = 0
        """Messages received, and those accepted before, since none waited."""
        self._drained_at = float("inf")
        self._lines = RateLimitedLog(log)
        self._reason = ""
        self._least_descriptors = 0
        self._bound_at = self._checked_at = self._trimmed_at = float("-inf")
        metrics.read("sidestep_zap_up", listener.zap_readings)

    def note_arrival(self, now: float, *, found: bool) -> None:
        """Note that the listener was read, and whether a message had been waiting."""
        if found:
            self._received += 1
        else:
            self._received, self._accepted_before = 0, self._accepted()
            self._drained_at = now

    def due(self, now: float) -> bool:
        """Return whether ``act`` should close or reopen the listener; trim memory at the soft limit."""
        if self._listener.socket is None:
            return now >= self._bound_at + PAUSE
        if self.has_too_many_connections():
            return True
        if self._watchdog.must_cut():
            self._reason = "memory"
        elif self._is_flooded(now):
            self._reason = "flood"
        elif now >= self._checked_at + PAUSE:
            self._checked_at = now
            wait = RETRY if self._listener.unbound else PAUSE
            if now >= self._bound_at + wait and self._listener.lost:
                self._reason = "stolen"
        if self._watchdog.full and now >= self._trimmed_at + TRIM_INTERVAL:
            self._trimmed_at = now
            trim()
        return bool(self._reason)

    def has_too_many_connections(self) -> bool:
        """Return whether new connections have opened too many files; if so, call ``act``.

        Call this as soon as a connection is accepted: a peer can connect 100 times in 20 ms.
        """
        if self._listener.has_accepted() and lowest_free_descriptor() >= self._max_descriptors():
            self._reason = "descriptors"
        return bool(self._reason)

    def act(self, now: float) -> None:
        """Close the listener if a limit is reached, and bind it again at most once per ``PAUSE``."""
        if self._reason == "memory" and self._free_others():
            self._reason = ""
            return
        if self._reason:
            self._metrics.add("sidestep_rebinds_total", 1, self._reason)
            self._listener.cut()
        if self._reason == "memory":
            trim()
            self._watchdog.check_after_cut()
        elif self._reason == "descriptors":
            self._note_descriptors()
        elif self._reason == "flood":
            self.note_arrival(now, found=False)
            self._lines.warning(
                "flood",
                "messages that are refused kept engines waiting for %d s: all connections are closed",
                FLOODED,
            )
        elif self._reason:
            self._lines.warning(
                "stolen",
                "the socket file of an ingest path was replaced or removed: binding it again",
            )
        self._reason = ""
        if now >= self._bound_at + PAUSE:
            self._bound_at = now
            self._listener.reopen()

    def _is_flooded(self, now: float) -> bool:
        """Return whether messages have waited for long, most of them refused."""
        accepted = self._accepted() - self._accepted_before
        return now >= self._drained_at + FLOODED and self._received > 2 * accepted

    def _free_others(self) -> bool:
        """Free what peers fill beside the listener; return whether that suffices.

        Engines would lose their connections for what a publisher or a page has sent.
        """
        if not self._cut():
            return False
        trim()
        if self._watchdog.must_cut():
            return False
        self._lines.warning(
            "others",
            "memory reached limits.memory-hard: what polls and subscriptions had received was discarded",
        )
        return True

    def _max_descriptors(self) -> int:
        return max(min(MAX_DESCRIPTORS, open_files_limit() * 3 // 4), self._least_descriptors)

    def _note_descriptors(self) -> None:
        """Log that all connections were closed; raise the limit if that freed too few descriptors."""
        self._lines.warning(
            "descriptors",
            "over %d files were open: all connections are closed",
            self._max_descriptors(),
        )
        left = lowest_free_descriptor()
        if left >= self._max_descriptors():
            self._least_descriptors = left + (open_files_limit() - left) // 2
            self._lines.error(
                "own files",
                "%d files are open without any connection; raise the limit of open files",
                left,
            )
