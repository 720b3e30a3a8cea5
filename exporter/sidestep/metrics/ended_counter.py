"""The counter of requests that ended: where their time went, and what their users waited."""

from __future__ import annotations

from sidestep.metrics.engine import Engine
from sidestep.tracking.requests.ended_requests import CountEnded
from sidestep.tracking.requests.handovers import HandOvers
from sidestep.tracking.requests.outcomes import FAILED, EndedRequest
from sidestep.tracking.requests.parts import KEYS, PREFILL_REMOTE

REQUEST_PARTS = "request_parts"
SERVICE_TTFT, SERVICE_E2E = "service_ttft", "service_e2e"
"""Handlers of its rows."""
_LABELS = {key: (limit, part) for key, (part, limit) in KEYS.items()}
"""Values of the parts' own labels, ``limit`` and ``part``."""


def ended_counter(engine: Engine, hand_overs: HandOvers) -> CountEnded | None:
    """Return what counts a request that ended; None if the engine's dialect sends no requests."""
    handled = engine.layout.handled
    if REQUEST_PARTS not in handled:
        return None
    children = engine.keyed[handled[REQUEST_PARTS].slots[0]]
    ttft, e2e = handled[SERVICE_TTFT].slots[0], handled[SERVICE_E2E].slots[0]

    def count(ended: EndedRequest) -> None:
        hand_overs.join(ended)
        for key, seconds in (ended.parts or {}).items():
            labels = _LABELS[key]
            children[labels] = children.get(labels, 0.0) + seconds
        if ended.is_service:
            if ended.ttft is not None:
                engine.histogram(ttft).observe(ended.ttft + ended.remote)
            if ended.latency is not None and ended.reason not in FAILED:
                engine.histogram(e2e).observe(ended.latency + ended.remote)
        if ended.remote > 0.0:
            # The other engine has counted the same time.
            ended.parts = {PREFILL_REMOTE: ended.remote, **(ended.parts or {})}

    return count
