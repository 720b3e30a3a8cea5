"""Comparison of the page with the pushed items, and of a fault's results with its promises."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from chaos.requests import TOKENS
from chaos.steps import ITEMS
from chaos.traffic import MODEL

MARKERS: Mapping[str, tuple[str, int]] = {
    f'vllm:mm_cache_queries_total{{engine="0",model_name="{MODEL}"}}': ("step", 1),
    f'vllm:generation_tokens_total{{engine="1",model_name="{MODEL}"}}': ("requests", TOKENS),
    f'{ITEMS}{{engine="0",kind="load",model_name="{MODEL}"}}': ("samples", 1),
    f'{ITEMS}{{engine="0",kind="store",model_name="{MODEL}"}}': ("samples", 1),
}
"""Counters that each item of a kind raises by the same amount."""
CORE = 'engine="1"'
LEARNED = "sidestep_request_part_seconds_total{"
"""Beginning of series that depend on all earlier steps: what they take without prefill, and apart, is learned."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A series whose value differs from that of the pushed items."""

    series: str
    pushed: float
    shown: float

    @property
    def share(self) -> float:
        """Return the share of what was pushed that is missing; negative if there is too much."""
        return (self.pushed - self.shown) / max(self.pushed, 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """The differences, and their sum in items.

    Attributes:
        lost: Missing items by the markers; if they miss none, by the worst series.
        doubled: Items too many, found in the same way.
        derived: Differing series whose values depend on several items: intervals, and the
            composition of batches.
        worst: The series that differ most, by share.
    """

    lost: int
    doubled: int
    derived: int
    worst: tuple[Difference, ...]


def is_derived(series: str) -> bool:
    """Return whether a series depends on more than one item: histograms of the core's request events."""
    histogram = any(f"_{end}{{" in series for end in ("bucket", "count", "sum"))
    return CORE in series and (histogram or series.startswith("sidestep_untracked_"))


def compare(
    pushed: Mapping[str, float], shown: Mapping[str, float], *, derived_apart: bool
) -> Comparison:
    """Compare every series of either side.

    ``derived_apart``: items are known to be missing. That shifts intervals rather than
    removing them, so intervals do not show whether items are lost or doubled.
    """
    differences = list(_differences(pushed, shown))
    apart = [d for d in differences if derived_apart and is_derived(d.series)]
    rest = [d for d in differences if d not in apart]
    items = {"step": 0.0, "requests": 0.0, "samples": 0.0}
    lost = doubled = 0.0
    for series, (kind, each) in MARKERS.items():
        items[kind] += pushed.get(series, 0.0) / each
        missing = (pushed.get(series, 0.0) - shown.get(series, 0.0)) / each
        lost += max(missing, 0.0)
        doubled += max(-missing, 0.0)
    lost_by_markers, doubled_by_markers = lost, doubled
    for difference in rest:
        kind = "requests" if CORE in difference.series else "step"
        kind = "samples" if "chaos_" in difference.series else kind
        estimate = abs(difference.share) * items[kind]
        if difference.share < 0:
            doubled = doubled if doubled_by_markers else max(doubled, estimate)
        elif not lost_by_markers:
            # Of lost items a rare value may miss more than its share.
            lost = max(lost, estimate)
    worst = sorted(rest, key=lambda d: abs(d.share), reverse=True)[:3]
    return Comparison(math.ceil(lost), math.ceil(doubled), len(apart), tuple(worst))


def _differences(pushed: Mapping[str, float], shown: Mapping[str, float]) -> Iterator[Difference]:
    for series in pushed.keys() | shown.keys():
        if series.startswith(LEARNED):
            continue
        ours, theirs = pushed.get(series, 0.0), shown.get(series, 0.0)
        if ours != theirs:
            yield Difference(series, ours, theirs)


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one fault over one transport.

    Attributes:
        counted: Lost items that the sender has counted as dropped.
        folded: Items merged while the ring was full.
        reset: The exporter ended without a state directory, so its counts are lost.
        phases: Latencies of pushes by phase, see ``engine.Phase``.
        waited: Seconds for which threads of engine and exporter were ready to run but had no core.
        starved: Whether ``waited`` was a considerable share of the run.
        recovery: Longest time from an exporter's start until all series were back.
        broken: Promises that did not hold, a line each.
    """

    fault: str
    transport: str
    rounds: int
    items: int
    seconds: float
    comparison: Comparison
    counted: int
    folded: int
    duplicates: int
    reset: bool
    decreases: int
    reset_pages: int
    scrapes: int
    scrape_errors: int
    phases: Mapping[str, Mapping[str, Mapping[str, float]]]
    ring_peak: int
    queue_peak: int
    recovery: float | None
    growth: int
    waited: float
    starved: bool
    publisher_cpu: float
    broken: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return dataclasses.asdict(self)


def broken_promises(
    comparison: Comparison,
    decreases: int,
    counted: int,
    *,
    reset: bool,
    folds: bool,
    starved: bool,
) -> Iterator[str]:
    """Return the promises that do not hold.

    ``reset``: the exporter ended, and its state with it, which is an ordinary counter
    reset. ``folds``: this release merges items while the ring is full, instead of
    dropping them. ``starved``: the machine gave a thread no core for so long that a queue
    may have overflowed; dropped items must be counted.
    """
    if comparison.doubled:
        yield f"{comparison.doubled} items were counted twice"
    if reset:
        return
    if decreases:
        yield f"{decreases} series went back"
    allowed = 0 if folds and not starved else counted
    if comparison.lost > allowed:
        yield f"{comparison.lost} items were lost, {counted} of them counted as dropped"
