"""The counter of requests that ended: where their time went, and what their users waited."""

from __future__ import annotations

from sidestep.metrics.engine import Engine
from sidestep.metrics.request_parts import part_counter
from sidestep.tracking.requests.ended_requests import CountEnded
from sidestep.tracking.requests.handovers import HandOvers
from sidestep.tracking.requests.outcomes import FAILED, EndedRequest

SERVICE_TTFT, SERVICE_E2E = "service_ttft", "service_e2e"
"""Handlers of its histograms."""


def ended_counter(engine: Engine, hand_overs: HandOvers) -> CountEnded | None:
    """Return what counts a request that ended; None if the engine's dialect sends no requests."""
    count_parts = part_counter(engine)
    if count_parts is None:
        return None
    ttft, e2e = (engine.layout.handler_slot(name) for name in (SERVICE_TTFT, SERVICE_E2E))

    def count(ended: EndedRequest) -> None:
        hand_overs.join(ended)
        count_parts(ended.parts or {})
        if not ended.is_service:
            return
        if ended.ttft is not None:
            engine.histogram(ttft).observe(ended.ttft + ended.remote)
        if ended.latency is not None and ended.reason not in FAILED:
            engine.histogram(e2e).observe(ended.latency + ended.remote)

    return count
