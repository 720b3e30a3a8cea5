"""Native histograms, compared with the definition of their buckets and with classic histograms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.catalog.buckets import DEFAULTS
from sidestep.errors import WireError
from sidestep.metrics.exponential_buckets import (
    MAX_BUCKETS,
    ZERO_THRESHOLD,
    check_native,
    coarser,
    index_of,
    upper,
)
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeHistogram, NativeSettings
from sidestep.protocol.engine_totals import NativeBuckets
from sidestep.protocol.limits import COARSEST, FINEST, VALUE_LIMIT

BOUNDS = DEFAULTS["inter_token_latency"]
SCHEMAS = st.integers(COARSEST, FINEST)
counted = st.one_of(
    st.floats(1e-4, 100.0),
    st.floats(0.0, VALUE_LIMIT),
    st.sampled_from([0.0, ZERO_THRESHOLD, math.nextafter(ZERO_THRESHOLD, 1.0), *BOUNDS]),
    st.integers(-60, 60).map(lambda part: 2.0 ** (part / 8)),
)
anything = st.one_of(counted, st.floats(allow_nan=True, allow_infinity=True))


def state(histogram: NativeHistogram) -> tuple[int, int, dict[int, int]]:
    """Return the native part of ``histogram``."""
    return histogram.schema, histogram.zeros, histogram.buckets


def observed(values: list[float], schema: int = 3) -> NativeHistogram:
    """Return a histogram that has observed ``values`` one by one."""
    found = NativeHistogram(BOUNDS, schema)
    for value in values:
        found.observe(value)
    return found


@given(SCHEMAS, st.floats(math.nextafter(ZERO_THRESHOLD, 1.0), VALUE_LIMIT))
def test_value_is_between_the_bounds_of_its_bucket(schema: int, value: float) -> None:
    """A value is above the lower bound of its bucket and at most the upper one."""
    index = index_of(schema, value)

    assert upper(schema, index - 1) < value <= upper(schema, index)


@given(SCHEMAS, st.integers(-100, 49))
def test_bound_belongs_to_the_bucket_below(schema: int, power: int) -> None:
    """The next float above it belongs to the next bucket."""
    first = index_of(schema, 2.0**power)
    for index in range(first, first + (1 << max(schema, 0)) + 1):
        bound = upper(schema, index)

        assert index_of(schema, bound) == index
        assert index_of(schema, math.nextafter(bound, math.inf)) == index + 1
    if schema >= 0:
        assert first == power << schema


@given(st.integers(COARSEST + 1, FINEST), st.floats(1e-30, VALUE_LIMIT), st.integers(1, 4))
def test_coarser_schema_merges_pairs_of_buckets(schema: int, value: float, steps: int) -> None:
    """Several steps can be made at once."""
    steps = min(steps, schema - COARSEST)
    found = coarser({index_of(schema, value): 3}, steps)

    assert found == {index_of(schema - steps, value): 3}


@given(st.lists(anything, max_size=200), SCHEMAS)
def test_batch_equals_single_observations(values: list[float], schema: int) -> None:
    """The classic part equals that of a classic histogram."""
    batch, each, classic = (
        NativeHistogram(BOUNDS, schema),
        observed(values, schema),
        Histogram(BOUNDS),
    )

    refused = batch.observe_many(list(values))

    assert state(batch) == state(each)
    assert refused == classic.observe_many(list(values))
    assert (batch.counts, batch.sum) == (classic.counts, classic.sum)


@given(st.lists(counted, max_size=400), SCHEMAS)
def test_native_and_classic_counts_are_equal(values: list[float], schema: int) -> None:
    """The number of buckets is limited."""
    histogram = NativeHistogram(BOUNDS, schema)
    histogram.observe_many(list(values))

    assert histogram.zeros + sum(histogram.buckets.values()) == len(values)
    assert sum(histogram.counts) == len(values)
    assert len(histogram.buckets) <= MAX_BUCKETS


@given(st.lists(counted, max_size=60), st.lists(counted, max_size=60), SCHEMAS, SCHEMAS)
def test_merge_equals_one_histogram_of_all_values(
    some: list[float], others: list[float], schema: int, other: int
) -> None:
    """The schema is the lower of both."""
    merged, added = observed(some, schema), observed(others, other)

    merged.merge(added)
    merged.merge(Histogram(BOUNDS))
    together = observed([*some, *others], min(schema, other, merged.schema))

    assert state(merged) == state(together)
    assert merged.counts == together.counts
    assert math.isclose(merged.sum, sum(some) + sum(others), rel_tol=1e-12, abs_tol=1e-30)


@given(st.lists(counted, max_size=100), st.sampled_from(sorted(DEFAULTS)))
def test_changed_bounds_keep_all_observations(values: list[float], family: str) -> None:
    """No observation moves to a lower bound, or further than the next bound over its native bucket."""
    values = [value if value > ZERO_THRESHOLD else 0.0 for value in values]
    before, bounds = observed(values), DEFAULTS[family]
    after = before.with_bounds(bounds)

    exact = Histogram(bounds)
    exact.observe_many(list(values))
    least = Histogram(bounds)
    least.observe_many([2 * value for value in values])
    assert state(after) == state(before)
    assert (sum(after.counts), after.sum) == (len(values), before.sum)
    for low, found, high in zip(least.cumulative, after.cumulative, exact.cumulative, strict=True):
        assert found <= high
        assert found >= low or not values


def test_classic_counts_move_to_native_buckets_by_their_bounds() -> None:
    """Values above the highest bound count just above it."""
    histogram = NativeHistogram((0.0, 1.0, 2.0))

    histogram.add([5, 4, 3, 2], 10.0)

    assert histogram.zeros == 5
    assert histogram.buckets == {0: 4, 8: 3, 9: 2}


def test_merge_keeps_the_earlier_creation_time() -> None:
    """Unknown creation times are ignored."""
    one, other = NativeHistogram(BOUNDS, created=5.0), NativeHistogram(BOUNDS, created=3.0)
    one.merge(NativeHistogram(BOUNDS))
    assert one.created == 5.0

    one.merge(other)

    assert one.created == 3.0


@pytest.mark.parametrize(
    "native",
    [
        NativeBuckets(3, 0, [1], [2]),
        NativeBuckets(3, 0, [1, 1], [2, 1]),
        NativeBuckets(3, 0, [1], [2, 1]),
        NativeBuckets(3, 0, [1], [-3]),
        NativeBuckets(3, -1, [1], [4]),
        NativeBuckets(3, 0, [1], ["3.0"]),
        NativeBuckets(3, 0, [5000], [3]),
        NativeBuckets(8, 0, [-40_000], [3]),
        NativeBuckets(-4, 0, [6], [3]),
    ],
)
def test_invalid_native_buckets_are_rejected(native: NativeBuckets) -> None:
    """The count differs, a bucket occurs twice or cannot exist, or a count is no number."""
    with pytest.raises(WireError):
        check_native(native, 3)


@given(st.lists(counted, max_size=100), SCHEMAS)
def test_wire_form_restores_the_histogram(values: list[float], schema: int) -> None:
    """The restored state is equal."""
    histogram = observed(values, schema)
    wire = histogram.to_wire()
    assert wire.native is not None
    check_native(wire.native, len(values))

    again = NativeHistogram(BOUNDS, schema)
    again.add(histogram.counts, histogram.sum, wire.native)

    assert state(again) == state(histogram)


def test_schema_is_set_by_operator_then_catalogue_then_default() -> None:
    """The creation time is the current one."""
    native = NativeSettings({"request_tokens": 5}, lambda: 7.0)

    assert native.histogram(BOUNDS, "request_tokens").schema == 5
    assert native.histogram(BOUNDS, "inter_token_latency").schema == 4
    assert native.histogram(BOUNDS, "reuses").schema == 3
    assert native.histogram(BOUNDS, "").created == 7.0
