"""Memory that strangers can take: a ROUTER keeps the parts of a message that never ends."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sidestep.errors import ConfigError

log = logging.getLogger(__name__)

MIB = 1 << 20
MARGIN = 4
"""What the exporter itself needs may be over the limit; peers then get this part of it."""


class Watchdog:
    """Two limits on resident memory: from the first nothing new, at the second let all go.

    Args:
        soft: Bytes from which no new stream is taken; 0: no limit.
        hard: Bytes at which the socket is closed, with all that it holds, and bound anew.
        read: Resident memory of this process in bytes.

    Attributes:
        full: Whether the soft limit is reached.

    Raises:
        ConfigError: The limits contradict each other.
    """

    def __init__(self, soft: int, hard: int, read: Callable[[], int]) -> None:
        if hard and soft > hard:
            raise ConfigError("limits.memory-soft must not be above limits.memory-hard")
        self.full = False
        self._soft = soft
        self._hard = self._limit = hard
        self._read = read

    def must_cut(self) -> bool:
        """Look at the memory; whether the socket is to be closed now."""
        resident = self._read()
        self._note(resident)
        if resident < self._hard:
            self._limit = self._hard
        return bool(self._hard) and resident >= self._limit

    def cut(self) -> None:
        """The socket is closed and its memory is free: see whether that has helped."""
        resident = self._read()
        self._note(resident)
        if resident < self._hard:
            self._limit = self._hard
            log.warning("memory had reached its limit; %d MiB are in use now", resident // MIB)
            return
        # Closing the socket again would free as little, so not before there is more.
        self._limit = resident + self._hard // MARGIN
        log.error(
            "%d MiB are in use without any connection, more than limits.memory-hard: that is the"
            " exporter's own state; raise the limit, or feed it fewer engines",
            resident // MIB,
        )

    def _note(self, resident: int) -> None:
        full = bool(self._soft) and resident >= self._soft
        if full and not self.full:
            log.warning("%d MiB are in use: no new streams are taken", resident // MIB)
        self.full = full
