"""Items that a publisher has dropped, for senders of events that depend on earlier ones."""

from __future__ import annotations

from sidestep_adapters.publisher.publisher import Publisher

DROPPING_CALLS = 60
"""Calls of a ``DropWatch``, one a second, after which dropping has gone on for too long."""


class DropWatch:
    """Notices that a publisher has dropped items."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._dropped = 0
        self._calls = 0
        """Calls since items were dropped; 0: none were."""

    def have_ended(self) -> bool:
        """Return True once after items were dropped, when the exporter answers and none are dropped.

        If dropping goes on, that is True about once a minute, so that senders forget what has ended.
        """
        dropped = self._publisher.dropped
        is_dropping, self._dropped = dropped != self._dropped, dropped
        if is_dropping or self._calls:
            self._calls += 1
        if not self._calls or not self._publisher.connected:
            return False
        if is_dropping and self._calls < DROPPING_CALLS:
            return False
        self._calls = 0
        return True
