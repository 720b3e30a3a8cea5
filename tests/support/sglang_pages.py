"""Comparison of SGLang's page with the exporter's; one table lists what may differ, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import pages
from pages import Family, Labels, comparable
from sidestep.engines.sglang.rows import DEAD

Samples = Mapping[tuple[str, Labels], float]
Rule = Callable[[Samples, Samples, Samples, float], bool]
"""A predicate of SGLang's samples, the exporter's, those of an earlier page of SGLang, and a tolerance."""


def says_nothing(theirs: Samples, ours: Samples, _since: Samples, _tolerance: float) -> bool:
    """Return whether the exporter has no sample of a family that SGLang never sets."""
    return not ours and all(math.isnan(value) or value in (0, -1) for value in theirs.values())


def rests(theirs: Samples, ours: Samples, _since: Samples, _tolerance: float) -> bool:
    """Return whether all values are 0, where SGLang still shows its last busy report."""
    return theirs.keys() == ours.keys() and not any(ours.values())


def ticks(theirs: Samples, ours: Samples, since: Samples, tolerance: float) -> bool:
    """Return whether each value lies between those of SGLang's two pages, as the family grows while idle."""
    return theirs.keys() == ours.keys() and all(
        since.get(key, 0) * (1 - tolerance) <= value <= theirs[key] * (1 + tolerance)
        for key, value in ours.items()
    )


def but_of_the_page(theirs: Samples, ours: Samples, _since: Samples, _tolerance: float) -> bool:
    """Return whether only counts of requests for the metrics page differ."""

    def others(samples: Samples) -> Samples:
        return {k: v for k, v in samples.items() if ("endpoint", "/metrics") not in k[1]}

    return others(theirs) == others(ours)


REPORTED = "of the last report before the scheduler had nothing to do; ours is what is so now"
CPU = "of a process, once in 5 s; ours is read once a second"
CLOCK = "the scheduler's loop, once a second, idle as well"
REQUEST = "the page's own request counts"

ALLOWED: Mapping[str, tuple[Rule, str]] = {
    **{name: (says_nothing, why) for name, why in DEAD},
    "sglang:fwd_occupancy": (says_nothing, "no number without a device timer"),
    "sglang:decode_sum_seq_lens": (rests, REPORTED),
    "sglang:gen_throughput": (rests, REPORTED),
    "sglang:num_retracted_reqs": (rests, REPORTED),
    "sglang:num_paused_reqs": (rests, REPORTED),
    "sglang:process_cpu_seconds": (ticks, CPU),
    "sglang:scheduler_idle_seconds": (ticks, CLOCK),
    "sglang:scheduler_process_cpu_seconds": (ticks, CLOCK),
    "sglang:scheduler_stage_seconds": (ticks, CLOCK),
    "sglang:http_requests": (but_of_the_page, REQUEST),
    "sglang:http_requests_active": (but_of_the_page, REQUEST),
    "sglang:http_responses": (but_of_the_page, REQUEST),
}
"""Families that may differ, by which rule, and why."""


def differences(
    theirs: Mapping[str, Family],
    ours: Mapping[str, Family],
    since: Mapping[str, Family],
    tolerance: float,
) -> Iterator[tuple[str, str]]:
    """Yield each family that differs in a way that ``ALLOWED`` does not list, and how."""
    plain, own = (
        {name: family for name, family in page.items() if name not in ALLOWED}
        for page in (theirs, ours)
    )
    yield from pages.differences(plain, own, tolerance=tolerance)
    for name, (rule, _) in ALLOWED.items():
        native, mine, before = (_samples(page, name) for page in (theirs, ours, since))
        if not rule(native, mine, before, tolerance):
            yield name, f"not {rule.__name__}: {mine}, not {native}"


def _samples(page: Mapping[str, Family], name: str) -> Samples:
    return comparable(page[name]) if name in page else {}
