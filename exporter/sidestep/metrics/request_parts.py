"""The counter of where requests' time went."""

from __future__ import annotations

from collections.abc import Mapping

from sidestep.metrics.engine import Engine
from sidestep.tracking.requests.ended_requests import CountParts
from sidestep.tracking.requests.parts import KEYS

REQUEST_PARTS = "request_parts"
"""Its handler."""
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
