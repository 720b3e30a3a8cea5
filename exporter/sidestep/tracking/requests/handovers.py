"""Requests that one engine has handed over to another, so that both parts can be joined."""

from __future__ import annotations

from collections.abc import Iterator

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
        arrival = None if ended.request is None else ended.request.arrival
        if arrival is None or ended.transfer not in (HANDED_OVER, RECEIVED):
            return
        for key in _keys(ended):
            if ended.transfer == HANDED_OVER:
                self._arrivals[key] = arrival
            elif (begin := self._arrivals.pop(key, None)) is not None:
                ended.remote = max(arrival - begin, 0.0)
        while len(self._arrivals) > MAX_HANDED_OVER:
            del self._arrivals[next(iter(self._arrivals))]


def _keys(ended: EndedRequest) -> Iterator[str]:
    identity = None if ended.request is None else ended.request.identity
    if identity is not None:
        yield from filter(None, {identity.join, identity.id})
