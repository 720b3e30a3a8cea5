"""Limits that make the exporter close all connections: on memory, on open files and on floods.

A ROUTER buffers without a limit what peers send, such as the parts of an endless message, and libzmq
cannot close a single connection. So the socket is closed and bound again, which also mends a path that
another process has replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sidestep.errors import ConfigError
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.listener import IngestListener
from sidestep.transport.process import lowest_free_descriptor, open_files_limit, trim

MIB = 1 << 20
MARGIN = 4
"""Peers may use 1/MARGIN of the hard limit more if the exporter's own state exceeds the limit."""


class Watchdog:
    """Soft and hard limit on resident memory.

    Args:
        soft: Bytes from which on new streams are rejected; 0: no limit.
        hard: Bytes from which on the socket is closed and bound again; 0: no limit.
    """

    def __init__(self, soft: int, hard: int, read: Callable[[], int]) -> None:
        if hard and soft > hard:
            raise ConfigError("limits.memory-soft must not be above limits.memory-hard")
        self.full = False
        self._soft = soft
        self._hard = self._limit = hard
        self._read = read
        self._lines = RateLimitedLog(log)

    def must_cut(self) -> bool:
        """Read the memory in use, and return whether to close the socket now."""
        resident = self._measure()
        return bool(self._hard) and resident >= self._limit

    def check_after_cut(self) -> None:
        """Check how much memory closing the socket has freed, and log it."""
        resident = self._measure()
        if resident < self._hard:
            self._lines.warning(
                "hard",
                "memory reached limits.memory-hard, all connections were closed; %d MiB are in use now",
                resident // MIB,
            )
            return
        # Closing the socket again would free as little, so the limit rises.
        self._limit = resident + self._hard // MARGIN
        self._lines.error(
            "own state",
            "%d MiB are in use without any connection, more than limits.memory-hard: that is the"
            " exporter's own state; raise the limit, or connect fewer engines",
            resident // MIB,
        )

    def _measure(self) -> int:
        resident = self._read()
        full = bool(self._soft) and resident >= self._soft
        if full and not self.full:
            self._lines.warning(
                "soft",
                "%d MiB are in use, more than limits.memory-soft: new streams are rejected",
                resident // MIB,
            )
        self.full = full
        if resident < self._hard:
            self._limit = self._hard
        return resident


log = logging.getLogger(__name__)

PAUSE = 1.0
"""Minimum seconds between two binds, and between two checks of the paths. Senders keep
unacknowledged frames, so a pause only delays them. During a longer pause their reconnection attempts
would back off, and a hostile peer that tries at once would fill the memory before them."""
MAX_DESCRIPTORS = 8192
"""Open file descriptors from which all connections are closed. libzmq aborts the process when an ipc
connection finds no descriptor left. It also aborts when a peer has chosen the routing id that the next
peer gets, which takes many connections to hit."""
TRIM_INTERVAL = 10.0
"""Seconds between two returns of free memory to the operating system, of some milliseconds each. glibc
keeps memory below a block in use: after a flood of messages the process stayed at twice its size."""
FLOODED = 5.0
"""Seconds of a flood, in which messages always wait and most are refused, until all connections are
closed. Messages of a peer wait even after the peer has left, so engines would wait behind them for
minutes."""
RETRY = 10.0
"""Seconds between attempts to bind an endpoint that another process uses; each attempt closes all
connections."""
REASONS = {
    "flood": f"messages that are refused kept engines waiting for {FLOODED:.0f} s: all connections are closed",
    "stolen": "the socket file of an ingest path was replaced or removed: binding it again",
}


class Upkeep:
    """Upkeep of a listener: poll ``due``, and call ``act`` if it returns true.

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
        """Return whether ``act`` should close or reopen the listener; also trim memory."""
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
        if now >= self._trimmed_at + TRIM_INTERVAL:
            self._trimmed_at = now
            trim()
        return bool(self._reason)

    def has_too_many_connections(self) -> bool:
        """Return whether new connections have opened too many files, so that ``act`` is due.

        Call it for each accepted connection: a peer can connect 100 times in 20 ms.
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
        elif self._reason:
            self.note_arrival(now, found=False)
            self._lines.warning(self._reason, REASONS[self._reason])
        self._reason = ""
        if now >= self._bound_at + PAUSE:
            self._bound_at = now
            self._listener.reopen()

    def _is_flooded(self, now: float) -> bool:
        """Return whether messages have waited for long, most of them refused."""
        accepted = self._accepted() - self._accepted_before
        return now >= self._drained_at + FLOODED and self._received > 2 * accepted

    def _free_others(self) -> bool:
        """Free other memory that peers fill; return whether that suffices.

        Otherwise engines would lose their connections because of a publisher's messages or of a page.
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
