"""Intervals of changes: simulated pairs whose truth is known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from request_runs import run
from sidestep.catalog.buckets import DEFAULTS
from sidestep.exposition.live.history import histogram_quantile
from sidestep_tools.compare.measurement import (
    Buckets,
    Estimate,
    Measurement,
    Ratio,
    Values,
    chunks,
    quantile,
    relative_change,
)
from sidestep_tools.compare.records import measurement
from sidestep_tools.compare.report import Thresholds, judge, rows
from sidestep_tools.request_records import Record

PAIRS = 60
SLOWER = 1.2
BOUNDS = DEFAULTS["time_to_first_token"]


def seconds(numbers: random.Random, factor: float, count: int = 300) -> list[list[float]]:
    """Return latencies in blocks."""
    return [*map(list, chunks([factor * numbers.lognormvariate(-1, 0.8) for _ in range(count)]))]


def counted(blocks: Sequence[Sequence[float]]) -> Buckets:
    """Return latencies by their buckets."""
    edges = [*BOUNDS, float("inf")]
    counts = []
    for block in blocks:
        found = Counter(next(edge for edge in edges if value <= edge) for value in block)
        counts.append([found[edge] for edge in edges])
    return Buckets(BOUNDS, counts)


def covered(found: Sequence[Estimate | None], truth: float) -> float:
    """Return the share of the intervals that have the truth."""
    hits = 0
    for each in found:
        assert each is not None
        assert each.low is not None
        assert each.high is not None
        hits += each.low <= truth <= each.high
    return hits / len(found)


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_intervals_of_quantiles_have_the_truth(share: float) -> None:
    """In about 95 of 100 pairs; with buckets, whose inside is not known, in more."""
    numbers = random.Random(share)
    exact: list[Estimate | None] = []
    by_bucket: list[Estimate | None] = []
    for _ in range(PAIRS):
        a, b = seconds(numbers, 1.0), seconds(numbers, SLOWER)
        for found, made in ((exact, Values), (by_bucket, counted)):
            first, second = quantile(made(a), share), quantile(made(b), share)
            assert first is not None
            assert second is not None
            found.append(relative_change(first, second))

    assert 0.92 <= covered(exact, SLOWER - 1) <= 0.99
    assert covered(by_bucket, SLOWER - 1) >= 0.95


def test_a_queue_is_no_reason_for_alarm() -> None:
    """Requests that queue together are alike; two runs of the same engine seldom differ."""
    verdicts = Counter(
        judge([*rows(measured(2 * pair), measured(2 * pair + 1), Thresholds(0.05, 0.5))])[0]
        for pair in range(8)
    )
    assert verdicts["worse"] + verdicts["better"] <= 1


def measured(seed: int) -> Measurement:
    """Return the measurement of a run whose requests queue."""
    made = (msgspec.convert(one, Record, from_attributes=True) for one in run(seed, queue=0.05))
    return measurement([*made])


def test_what_never_failed_may_fail() -> None:
    """None of 100 requests is not 0 %: it is at most 3 %."""
    found = Ratio([0] * 20, [5] * 20, is_share=True).estimate()

    assert found == (0, 0, 0.03)


@given(st.lists(st.integers(0, 50), min_size=len(BOUNDS) + 1, max_size=len(BOUNDS) + 1))
def test_quantiles_of_buckets_are_promqls(counts: list[int]) -> None:
    """They are interpolated, and lie within their bucket."""
    for share in (0.05, 0.5, 0.95, 1.0):
        found = quantile(Buckets(BOUNDS, [counts]), share)
        wanted = histogram_quantile(share, BOUNDS, counts)
        assert (found and found.value) == (wanted and pytest.approx(wanted))


def test_what_is_in_one_block_has_no_interval() -> None:
    """A burst that no other followed says nothing of the next one."""
    assert Ratio([0.0] * 19 + [3.0], [0.0] * 19 + [2.0]).estimate() == (1.5, None, None)


def test_a_tail_in_one_block_has_no_interval() -> None:
    """One slow minute says nothing of how often there is one."""
    blocks = [[0.1] * 100 for _ in range(19)] + [[9.0] * 100]

    assert quantile(Values(blocks), 0.99) == (9.0, None, None)
    assert quantile(Values([[0.1, 0.2] * 50] * 20), 0.5) == (0.1, 0.1, 0.1)
