"""The counters of requests that ended: where their time went, and what their users waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Key, Number
from sidestep.protocol.limits import OTHER
from sidestep.tracking.requests.front_end import CountEnded
from sidestep.tracking.requests.handovers import HandOvers
from sidestep.tracking.requests.outcomes import FAILED, EndedRequest
from sidestep.tracking.requests.parts import KEYS

CountParts = Callable[[Mapping[str, float]], None]
"""Counter of the parts of a request, in seconds by ``parts.KEYS``."""
REQUEST_PARTS = "request_parts"
TENANT_PARTS = "tenant_request_parts"
"""Handlers of the counter of an engine, and of the one by tenant, which has no limits."""
_LABELS = {key: (limit, part) for key, (part, limit) in KEYS.items()}
"""Values of its own labels, ``limit`` and ``part``."""


def part_seconds(engine: Engine) -> dict[str, float]:
    """Return the seconds of the engine's ended requests by part, in the order of a request's life."""
    found = engine.layout.handled.get(REQUEST_PARTS)
    children = {} if found is None else engine.keyed[found.slots[0]]
    return {key: children[labels] for key, labels in _LABELS.items() if labels in children}


def part_counter(engine: Engine) -> CountParts | None:
    """Return what adds the parts of a request to the counter; None if the engine's dialect has none."""
    found = engine.layout.handled.get(REQUEST_PARTS)
    if found is None:
        return None
    children = engine.keyed[found.slots[0]]

    def count(parts: Mapping[str, float]) -> None:
        for key, seconds in parts.items():
            labels = _LABELS[key]
            children[labels] = children.get(labels, 0.0) + seconds

    return count


def begin_parts_by_tenant(engine: Engine) -> dict[Key, Number]:
    """Return the children of the counter by tenant, whose sums equal the engine's own counter.

    ``__other__`` gets what was counted before tenants were counted. It never decreases: sums of floats
    differ in their last digit by their order.
    """
    handled = engine.layout.handled
    children = engine.keyed[handled[TENANT_PARTS].slots[0]]
    uncounted: defaultdict[str, float] = defaultdict(float)
    for (_, part), seconds in engine.keyed[handled[REQUEST_PARTS].slots[0]].items():
        uncounted[part] += seconds
    for (part, tenant), seconds in children.items():
        if tenant != OTHER:
            uncounted[part] -= seconds
    for part, seconds in uncounted.items():
        children[part, OTHER] = max(seconds, children.get((part, OTHER), 0.0))
    return children


def add_parts_of_tenant(
    children: dict[Key, Number], parts: Mapping[str, float], tenant: str
) -> None:
    """Add the parts of a request to those of a tenant that is shown, or of ``__other__``."""
    for key, seconds in parts.items():
        labels = KEYS[key][0], tenant
        children[labels] = children.get(labels, 0.0) + seconds


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
