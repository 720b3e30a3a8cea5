"""Service-level objectives (``--slo``): names, thresholds, and the families that they count."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SLO_REQUESTS = "sidestep_slo_requests_total"
SLO_UNDECIDED = "sidestep_slo_unjudged_requests_total"
SLO_HANDLERS = ("slo_requests", "slo_undecided")
"""Handlers that feed these two rows."""
GOOD, BAD = RESULTS = "good", "bad"
AVAILABILITY = "availability"

LATENCIES = ("ttft", "inter_token", "time_per_output_token", "e2e", "queue")
"""Predefined objectives; ``DialectTables.latencies`` has their families."""


@dataclasses.dataclass(frozen=True, slots=True)
class Objective:
    """One objective.

    Attributes:
        families: Histograms whose observations count, or one of ``LATENCIES``, which stands for a
            histogram of each engine. Empty: the objective counts how requests end.
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
    """All objectives of one exporter, by family."""

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
