"""Limits on memory that untrusted peers can fill: a ROUTER buffers the parts of an endless message."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sidestep.errors import ConfigError
from sidestep.telemetry.logs import RateLimitedLog

log = logging.getLogger(__name__)

MIB = 1 << 20
MARGIN = 4
"""Peers may use 1/MARGIN of the hard limit more if the exporter's own state is over the limit."""


class Watchdog:
    """Soft and hard limit on resident memory.

    Args:
        soft: Bytes from which new streams are rejected; 0: no limit.
        hard: Bytes at which the socket, with all its buffers, is closed and bound again.
        read: Resident memory of this process in bytes.

    Attributes:
        full: True if the soft limit is reached.
        resident: Resident memory as it was last read.

    Raises:
        ConfigError: The limits contradict each other.
    """

    def __init__(self, soft: int, hard: int, read: Callable[[], int]) -> None:
        if hard and soft > hard:
            raise ConfigError("limits.memory-soft must not be above limits.memory-hard")
        self.full = False
        self.resident = 0
        self._soft = soft
        self._hard = self._limit = hard
        self._read = read
        self._lines = RateLimitedLog(log)

    def must_cut(self) -> bool:
        """Read the memory in use, and return whether to close the socket now."""
        resident = self._read()
        self._note(resident)
        if resident < self._hard:
            self._limit = self._hard
        return bool(self._hard) and resident >= self._limit

    def check_after_cut(self) -> None:
        """Check how much memory closing the socket has freed, and log it."""
        resident = self._read()
        self._note(resident)
        if resident < self._hard:
            self._limit = self._hard
            self._lines.warning(
                "hard",
                "memory reached limits.memory-hard, all connections were closed; %d MiB are in use now",
                resident // MIB,
            )
            return
        # Closing the socket again would free as little, so raise the limit.
        self._limit = resident + self._hard // MARGIN
        self._lines.error(
            "own state",
            "%d MiB are in use without any connection, more than limits.memory-hard: that is the"
            " exporter's own state; raise the limit, or connect fewer engines",
            resident // MIB,
        )

    def _note(self, resident: int) -> None:
        self.resident = resident
        full = bool(self._soft) and resident >= self._soft
        if full and not self.full:
            self._lines.warning(
                "soft",
                "%d MiB are in use, more than limits.memory-soft: new streams are rejected",
                resident // MIB,
            )
        self.full = full
