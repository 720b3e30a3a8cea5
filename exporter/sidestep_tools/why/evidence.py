"""Numbers that support or limit what to change, for each cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from sidestep.catalog.tuning import Cause
from sidestep_tools.formatting import duration, share
from sidestep_tools.why.timeline import Step

MIN_REQUESTS = 20
"""Requests, or steps, from which on shares and quantiles mean something."""
MIN_POINTS = 0.01
"""Least rise of the hit ratio by twice the cache that is worth a word."""
PRESENT, TWICE = 1.0, 2.0
"""Sizes of the cache, as multiples of the present one."""


class CurvePoint(msgspec.Struct, frozen=True):
    """A point of ``/api/v1/kv/curve``: the hit ratio of a cache that is ``capacity`` times as large."""

    capacity: float
    hit_ratio: float


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the quantile of ascending numbers, one of which it is."""
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def evidence(
    cause: Cause,
    steps: Sequence[Step],
    binding: Mapping[str, float],
    curve: Sequence[CurvePoint],
) -> Iterator[str]:
    """Yield numbers that support or limit what to change."""
    if cause.name in binding:
        yield f"the limit {cause.name} held {share(binding[cause.name])} of the time"
    match cause.name:
        case "kv_blocks":
            yield from _of_twice_the_cache(curve)
        case "slots":
            yield from _of_larger_batches(steps)
        case "tokens":
            sizes = sorted(s.prefill_tokens + s.decode_tokens for s in steps if s.prefill_requests)
            if sizes:
                yield f"a step with prefill has up to {quantile(sizes, 0.95):,} tokens"
        case "interference":
            yield from _of_prefill(steps)


def _of_twice_the_cache(curve: Sequence[CurvePoint]) -> Iterator[str]:
    ratios = {point.capacity: point.hit_ratio for point in curve}
    if PRESENT in ratios and TWICE in ratios:
        rise = ratios[TWICE] - ratios[PRESENT]
        if rise >= MIN_POINTS:
            yield f"at twice the cache the hit ratio rises by {100 * rise:.0f} points to {share(ratios[TWICE])}"
        else:
            yield "twice the cache raises the hit ratio by less than a point: it gives room, no hits"


def _of_larger_batches(steps: Sequence[Step]) -> Iterator[str]:
    """Yield how much longer steps of larger batches are, from the decode steps of two sizes."""
    decodes = sorted((s.size, s.end - s.begin) for s in steps if not s.prefill_requests)
    if not decodes:
        return
    most = decodes[-1][0]
    large = sorted(seconds for size, seconds in decodes if size > 0.75 * most)
    small = sorted(seconds for size, seconds in decodes if size <= most / 2)
    yield f"the batch has up to {most} requests"
    if len(small) >= MIN_REQUESTS and len(large) >= MIN_REQUESTS:
        yield (
            f"a step with over {0.75 * most:.0f} takes {duration(quantile(large, 0.5))},"
            f" with at most {most // 2} {duration(quantile(small, 0.5))}"
        )


def _of_prefill(steps: Sequence[Step]) -> Iterator[str]:
    both = [
        sorted(s.end - s.begin for s in steps if bool(s.prefill_requests) is has_prefill)
        for has_prefill in (True, False)
    ]
    if all(both):
        longer, plain = (duration(quantile(each, 0.5)) for each in both)
        yield f"a step with prefill takes {longer} (median), without {plain}"
