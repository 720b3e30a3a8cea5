"""Requests that one engine has handed over to another, so that both parts can be joined."""

from __future__ import annotations

from sidestep.protocol.request_events import HANDED_OVER, RECEIVED
from sidestep.tracking.requests.outcomes import EndedRequest

MAX_HANDED_OVER = 16_384
"""Most keys of hand-overs that are kept for the engine that continues them."""


class HandOvers:
    """Arrivals of requests at the engines that have computed their prompts, by all keys of the request.

    Only identities have keys; the exporter must receive both engines.
    """

    def __init__(self) -> None:
        self._arrivals: dict[str, float] = {}

    def join(self, ended: EndedRequest) -> None:
        """Note a request that was handed over, or give the time before its arrival to one that was received."""
        request = ended.request
        if request is None or request.arrival is None or request.identity is None:
            return
        # Clients may use an id again; what the connectors call a request comes last, and so decides.
        for key in filter(None, (request.identity.id, request.identity.join)):
            if ended.transfer == HANDED_OVER:
                self._arrivals[key] = request.arrival
            elif ended.transfer == RECEIVED and key in self._arrivals:
                ended.remote = max(request.arrival - self._arrivals[key], 0.0)
                # Parallel samples have the same keys.
                if request.lone:
                    del self._arrivals[key]
        while len(self._arrivals) > MAX_HANDED_OVER:
            del self._arrivals[next(iter(self._arrivals))]
