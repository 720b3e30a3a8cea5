"""The books that the exporter's page is held against, and what a difference comes to."""

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
from sidestep.engines.items import decode_item, encode_item
from sidestep.exposition.text_page import render
from sidestep.metrics.registry import Registry


def books(traffic: Traffic, items: int) -> dict[str, float]:
    """What the page must show for the first ``items``."""
    pages = (
        tally.page(engine, MODEL)
        for tally, engine in zip(traffic.tallies(items), ENGINES, strict=True)
    )
    return {key: value for page in pages for key, value in page.items()}


class Applied:
    """An exporter's series without an exporter."""

    def __init__(self) -> None:
        self.registry = Registry({"vllm": compile_layout(DIALECTS["vllm"])}, {})
        self.applier = Applier(self.registry)
        self.engines = [self.registry.register(info) for info in infos()]

    def take(self, traffic: Traffic, numbers: range) -> None:
        """Apply these items, as they travel."""
        for number in numbers:
            item = decode_item(encode_item(traffic.item(number)[0]))
            self.applier.apply(self.engines[item.engine], item)

    @property
    def page(self) -> dict[str, float]:
        """As the scraper reads it."""
        return parse(render(self.registry).decode(), MODEL)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_books_equal_the_page_after_any_number_of_items(seed: int) -> None:
    """Every series, sums included, at cuts inside and between the cycles of the core's requests."""
    traffic, applied = Traffic(seed, 1), Applied()
    done = 0
    for items in (1, 7, 16, 100, len(PATTERN) * LENGTH * 9 + 5):
        applied.take(traffic, range(done, items))
        done = items

        assert not compare(books(traffic, items), applied.page, derived_apart=False).worst


def test_the_books_know_what_a_killed_engine_leaves_open() -> None:
    """The successor's first word cuts off the requests under way."""
    first, second = Traffic(3, 1), Traffic(4, 2)
    applied = Applied()
    applied.take(first, range(50))
    applied.take(second, range(40))
    expected = books(second, 40)
    for tally, engine in zip(first.tallies(50, died=True), ENGINES, strict=True):
        for key, value in tally.page(engine, MODEL).items():
            expected[key] = expected.get(key, 0.0) + value

    assert not compare(expected, applied.page, derived_apart=False).worst


def test_an_item_that_is_missing_or_twice_is_seen_in_the_series() -> None:
    """Whichever item it is."""
    traffic = Traffic(5, 1)
    for number in range(20):
        for times, expected in ((0, (1, 0)), (2, (0, 1))):
            applied = Applied()
            applied.take(traffic, range(number))
            for _ in range(times):
                applied.take(traffic, range(number, number + 1))
            applied.take(traffic, range(number + 1, 21))
            found = compare(books(traffic, 21), applied.page, derived_apart=True)

            assert (found.lost, found.doubled) == expected


def test_one_series_that_differs_is_enough() -> None:
    """Although every counter that items raise is as it should be."""
    pushed = books(Traffic(1, 1), 500)
    name = f'vllm:request_params_n_bucket{{engine="0",model_name="{MODEL}",le="1.0"}}'

    assert name in pushed
    assert name not in MARKERS
    less = compare(pushed, {**pushed, name: pushed[name] - 1}, derived_apart=True)
    more = compare(pushed, {**pushed, name: pushed[name] + 1}, derived_apart=True)
    assert (less.lost > 0, less.doubled) == (True, 0)
    assert (more.lost, more.doubled > 0) == (0, True)


def test_a_value_belongs_to_the_first_bucket_it_does_not_pass() -> None:
    """As Prometheus has it: a bound holds its own value."""
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
    ("found", "reset", "folds", "broken"),
    [
        ((0, 0, 0, 0), False, False, 0),
        ((1, 0, 0, 0), False, False, 1),
        ((1, 0, 0, 1), False, False, 0),
        ((1, 0, 0, 1), False, True, 1),
        ((0, 0, 3, 0), False, False, 1),
        ((5, 0, 3, 0), True, False, 0),
        ((0, 1, 0, 0), True, False, 1),
    ],
)
def test_what_breaks_a_promise(
    found: tuple[int, int, int, int], reset: bool, folds: bool, broken: int
) -> None:
    """Nothing twice, ever; nothing lost or back unless the exporter's state was lost with it."""
    lost, doubled, decreases, counted = found
    lines = broken_promises(
        Comparison(lost, doubled, 0, ()), decreases, counted, reset=reset, folds=folds
    )

    assert len(list(lines)) == broken


def test_percentiles_are_an_eighth_too_high_at_most() -> None:
    """And never above the highest value."""
    latencies = Latencies()
    for value in range(1, 100_001):
        latencies.note(value)

    for share in (0.5, 0.99, 0.999):
        exact = math.ceil(share * 100_000) / 1e3
        assert exact <= latencies.percentile(share) <= exact * 1.125
    assert latencies.figures["max"] == 100.0
