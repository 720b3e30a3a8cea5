"""The oracle: the expected page, and the verdict on a page that differs."""

from __future__ import annotations

import math

import pytest
from chaos.latency import Latencies
from chaos.requests import LENGTH
from chaos.tally import Tally
from chaos.traffic import ENGINES, MODEL, PATTERN, Traffic, infos
from chaos.verdict import MARKERS, Comparison, broken_promises, compare
from chaos.watch import parse

from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.exposition.text_page import render
from sidestep.metrics.registry import Registry


def expected_page(traffic: Traffic, items: int) -> dict[str, float]:
    """Return the expected page after ``items`` items."""
    pages = (
        tally.page(engine, MODEL)
        for tally, engine in zip(traffic.tallies(items), ENGINES, strict=True)
    )
    return {key: value for page in pages for key, value in page.items()}


class Applied:
    """Series of a registry without an exporter."""

    def __init__(self) -> None:
        self.registry = Registry({"vllm": compile_layout(DIALECTS["vllm"])})
        self.applier = Applier(self.registry)
        self.engines = [self.registry.register(info) for info in infos()]

    def apply(self, traffic: Traffic, numbers: range) -> None:
        """Encode, decode and apply these items."""
        for number in numbers:
            item = DIALECTS.decode(encode_item(traffic.item(number)[0]))
            self.applier.apply(self.engines[item.engine], item)

    @property
    def page(self) -> dict[str, float]:
        """Page as the scraper parses it."""
        return parse(render(self.registry).decode(), MODEL)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_expected_page_equals_the_real_one(seed: int) -> None:
    """The expected page equals the real one after any number of items, sums included."""
    traffic, applied = Traffic(seed, 1), Applied()
    done = 0
    for items in (1, 7, 16, 100, len(PATTERN) * LENGTH * 9 + 5):
        applied.apply(traffic, range(done, items))
        done = items

        assert not compare(expected_page(traffic, items), applied.page, derived_apart=False).worst


def test_the_expected_page_includes_a_killed_engine() -> None:
    """The expected page includes the requests that a killed engine leaves open."""
    first, second = Traffic(3, 1), Traffic(4, 2)
    applied = Applied()
    applied.apply(first, range(50))
    applied.apply(second, range(40))
    expected = expected_page(second, 40)
    for tally, engine in zip(first.tallies(50, died=True), ENGINES, strict=True):
        for key, value in tally.page(engine, MODEL).items():
            expected[key] = expected.get(key, 0.0) + value

    assert not compare(expected, applied.page, derived_apart=False).worst


def test_a_missing_or_repeated_item_is_found() -> None:
    """A missing or repeated item shows as lost or doubled, whichever it is."""
    traffic = Traffic(5, 1)
    for number in range(20):
        for times, expected in ((0, (1, 0)), (2, (0, 1))):
            applied = Applied()
            applied.apply(traffic, range(number))
            for _ in range(times):
                applied.apply(traffic, range(number, number + 1))
            applied.apply(traffic, range(number + 1, 21))
            found = compare(expected_page(traffic, 21), applied.page, derived_apart=True)

            assert (found.lost, found.doubled) == expected


def test_one_differing_series_is_found() -> None:
    """One differing series is a loss or a doubling even if all item counters agree."""
    pushed = expected_page(Traffic(1, 1), 500)
    name = f'vllm:request_params_n_bucket{{engine="0",model_name="{MODEL}",le="1.0"}}'

    assert name in pushed
    assert name not in MARKERS
    less = compare(pushed, {**pushed, name: pushed[name] - 1}, derived_apart=True)
    more = compare(pushed, {**pushed, name: pushed[name] + 1}, derived_apart=True)
    assert (less.lost > 0, less.doubled) == (True, 0)
    assert (more.lost, more.doubled > 0) == (0, True)


def test_a_bound_belongs_to_its_bucket() -> None:
    """A value equal to a bound belongs to that bucket, as in Prometheus."""
    tally = Tally()
    tally.observe("h", "chaos_wait", 0.125, 0.25, 9.0)
    page = tally.page("0", "m")

    assert [page[f'h_bucket{{engine="0",model_name="m",le="{le}"}}'] for le in (0.125, 0.5)] == [
        1,
        2,
    ]
    assert page['h_bucket{engine="0",model_name="m",le="+Inf"}'] == 3
    assert page['h_sum{engine="0",model_name="m"}'] == 9.375


@pytest.mark.parametrize(
    ("found", "reset", "folds", "starved", "broken"),
    [
        ((0, 0, 0, 0), False, False, False, 0),
        ((1, 0, 0, 0), False, False, False, 1),
        ((1, 0, 0, 1), False, False, False, 0),
        ((1, 0, 0, 1), False, True, False, 1),
        ((1, 0, 0, 1), False, True, True, 0),
        ((2, 0, 0, 1), False, True, True, 1),
        ((0, 0, 3, 0), False, False, True, 1),
        ((5, 0, 3, 0), True, False, False, 0),
        ((0, 1, 0, 0), True, False, True, 1),
    ],
)
def test_broken_promises_are_listed(
    found: tuple[int, int, int, int], reset: bool, folds: bool, starved: bool, broken: int
) -> None:
    """Doubled items break a promise; lost ones and decreases do unless the exporter lost its state.

    Counted drops break one as well where the machine gave the processes their cores.
    """
    lost, doubled, decreases, counted = found
    comparison = Comparison(lost, doubled, 0, ())
    lines = broken_promises(
        comparison, decreases, counted, reset=reset, folds=folds, starved=starved
    )

    assert len(list(lines)) == broken


def test_percentiles_are_at_most_an_eighth_too_high() -> None:
    """Percentiles are too high by an eighth at most, and never above the maximum."""
    latencies = Latencies()
    for value in range(1, 100_001):
        latencies.note(value)

    for share in (0.5, 0.99, 0.999):
        exact = math.ceil(share * 100_000) / 1e3
        assert exact <= latencies.percentile(share) <= exact * 1.125
    assert latencies.figures["max"] == 100.0
