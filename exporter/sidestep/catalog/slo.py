"""Service level objectives (``--slo``): names, thresholds, and the families that they count."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

SLO_REQUESTS = "sidestep_slo_requests_total"
SLO_UNDECIDED = "sidestep_slo_unjudged_requests_total"
SLO_HANDLERS = ("slo_requests", "slo_undecided")
"""Handlers that feed these two rows."""
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
"""Predefined objectives: the latency family of each engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Objective:
    """One objective.

    Attributes:
        families: Histograms whose observations count. Empty: the objective counts how requests end.
        threshold: The highest latency of a good observation, in seconds.
    """

    name: str
    families: tuple[str, ...] = ()
    threshold: float = 0.0


class Limit(NamedTuple):
    """The threshold that one objective sets for a family."""

    objective: str
    threshold: float


class Objectives:
    """All objectives of one exporter, by family.

    Attributes:
        names: The names of all objectives.
        availability: Whether an objective counts how requests end.
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
        """Return whether ``key``, an objective after an optional result, names a known objective."""
        *results, name = key
        return name in self.names and all(result in RESULTS for result in results)

    def limits(self, family: str) -> Sequence[Limit]:
        """Return the thresholds for ``family``."""
        return self._limits.get(family, ())
