"""Objectives of an operator (``--slo``): their names, thresholds, and the families that they read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

SLO_REQUESTS = "sidestep_slo_requests_total"
SLO_UNDECIDED = "sidestep_slo_unjudged_requests_total"
SLO_HANDLERS = ("slo_requests", "slo_unjudged")
"""Hooks of the two."""
GOOD, BAD = RESULTS = "good", "bad"
AVAILABILITY = "availability"

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "ttft": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "inter_token": ("vllm:inter_token_latency_seconds", "sglang:inter_token_latency_seconds"),
    "time_per_output_token": (
        "vllm:request_time_per_output_token_seconds",
        "sglang:request_time_per_output_token_seconds",
    ),
    "e2e": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
    "queue": ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
}
"""Objectives that have a name of their own: the family of each engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Objective:
    """One of them.

    Attributes:
        families: Histograms that it is about; none: how requests end.
        threshold: Seconds that a good observation takes at most.
    """

    name: str
    families: tuple[str, ...] = ()
    threshold: float = 0.0


class Limit(NamedTuple):
    """What an objective allows of a family."""

    objective: str
    threshold: float


class Objectives:
    """Those of one exporter, by family.

    Attributes:
        names: All of them.
        availability: Whether the ends of requests are judged.
    """

    def __init__(self, found: Iterable[Objective] = ()) -> None:
        found = tuple(found)
        self.names = frozenset(one.name for one in found)
        self.availability = any(not one.families for one in found)
        self._limits: dict[str, list[Limit]] = {}
        for one in found:
            for family in dict.fromkeys(one.families):
                self._limits.setdefault(family, []).append(Limit(one.name, one.threshold))

    def includes(self, key: tuple[str, ...]) -> bool:
        """Whether a child is of one of them: its result, where it has one, and an objective."""
        *results, name = key
        return name in self.names and all(result in RESULTS for result in results)

    def limits(self, family: str) -> Sequence[Limit]:
        """What is allowed of ``family``."""
        return self._limits.get(family, ())
