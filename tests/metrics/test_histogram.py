"""Classic histograms, compared with brute force."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sidestep.catalog.buckets import DEFAULTS
from sidestep.metrics.histogram import Histogram
from sidestep.protocol.limits import VALUE_LIMIT

BOUNDS = DEFAULTS["inter_token_latency"]
values = st.one_of(st.floats(0, 200), st.sampled_from(BOUNDS), st.integers(0, 100).map(float))


def brute_force(observed: list[float]) -> list[int]:
    """Return the cumulative counts of ``observed`` by definition."""
    return [sum(v <= bound for v in observed) for bound in (*BOUNDS, math.inf)]


@given(st.lists(values, max_size=300))
def test_cumulative_counts_equal_brute_force(observed: list[float]) -> None:
    """A bucket counts values up to its bound, for any batch size."""
    histogram = Histogram(BOUNDS)

    refused = histogram.observe_many(list(observed))

    assert histogram.cumulative == brute_force(observed)
    assert math.isclose(histogram.sum, sum(observed), rel_tol=1e-12)
    assert refused == 0


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60))
def test_invalid_values_are_refused_and_counted(observed: list[float]) -> None:
    """Negative, infinite, absurd and undefined values are refused."""
    histogram = Histogram(BOUNDS)
    known = [v for v in observed if 0 <= v <= VALUE_LIMIT]

    refused = histogram.observe_many(list(observed))

    assert refused == len(observed) - len(known)
    assert histogram.cumulative == brute_force(known)
    assert math.isfinite(histogram.sum)


@given(st.lists(st.tuples(values | st.sampled_from([-1.0, math.nan, math.inf]), st.integers(1, 9))))
def test_weights_equal_repeated_observations(observed: list[tuple[float, int]]) -> None:
    """Refused values count by their weight, too."""
    weighted, each = Histogram(BOUNDS), Histogram(BOUNDS)

    refused = weighted.observe_weighted(observed)
    expected = each.observe_many([value for value, count in observed for _ in range(count)])

    assert weighted.counts == each.counts
    assert math.isclose(weighted.sum, each.sum, rel_tol=1e-12)
    assert refused == expected
