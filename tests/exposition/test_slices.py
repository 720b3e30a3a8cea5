"""Slices: the event loop runs other tasks after little work, for any number of engines."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

import metric_families
from intakes import Fed, discard
from pages import parse
from sidestep.catalog.layout_builder import compile_layout
from sidestep.catalog.model import Kind
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.exposition import json_format, protobuf_page
from sidestep.exposition.aggregate import aggregate_states
from sidestep.exposition.negotiation import Format
from sidestep.exposition.own_families import PER_SLICE, OwnFamilies
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_page import TextPage
from sidestep.ingest.engine_metrics import SeriesCount, series_of
from sidestep.metrics.engine import Engine
from sidestep.metrics.histogram import Histogram, State
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.telemetry import cooperative
from sidestep.telemetry.cooperative import MAX_SLICE, SLICE, collect_in_slices
from sidestep.telemetry.self_metrics import OwnRegistry
from slices import MOST, counted, made, slices

MANY = 512
FORMS: tuple[Format, ...] = ("text", "openmetrics", "protobuf")


def info(number: int) -> EngineInfo:
    """Return one of many engines."""
    return EngineInfo(f"e{number}", "vllm", {"engine": str(number), "model_name": "m"})


def fleet(engines: int) -> Fed:
    """Return an ingest of so many engines, each with a stream."""
    fed = Fed()
    for number in range(engines):
        fed.send_hello(f"s{number % 250}", [info(n) for n in range(number % 250, engines, 250)])
    return fed


@functools.cache
def many() -> Fed:
    """Return ``MANY`` engines, which tests do not change."""
    return fleet(MANY)


@pytest.mark.parametrize("form", FORMS)
def test_the_exporters_own_families_are_written_in_small_slices(form: Format) -> None:
    """With families that have a sample for each engine and stream."""
    texts = OwnFamilies(OwnRegistry(many().intake.metrics))

    assert max(slices(texts.pieces(form))) < MOST


@pytest.mark.parametrize("form", FORMS)
def test_the_exporters_own_families_equal_those_of_a_new_page(form: Format) -> None:
    """After values change, and after engines come, go and change their labels."""
    fed = fleet(2)
    texts = OwnFamilies(OwnRegistry(fed.intake.metrics))

    def same() -> bool:
        """Return whether a page equals a new one; the collectors at its end are left out."""
        fresh = OwnFamilies(OwnRegistry(fed.intake.metrics))
        found, wanted = ([*one.pieces(form)][:-1] for one in (texts, fresh))
        return b"".join(found) == b"".join(wanted)

    assert same()
    fed.intake.registry.engines["e1"].last_seen = 7.0
    assert same()
    for number in range(2, PER_SLICE + 10):
        fed.send_hello(f"s{number}", [info(number)])
    assert same()
    for number in range(5, PER_SLICE + 10):
        discard(fed.intake.registry, fed.intake.registry.engines[f"e{number}"])
    assert same()
    fed.intake.registry.engines["e1"].labels["model_name"] = "other"
    fed.intake.registry.engines["e1"].renew_label_version()
    assert same()


def test_the_exporters_own_families_have_a_sample_for_each_engine() -> None:
    """After engines come, go and change their labels."""
    fed = fleet(2)
    registry = fed.intake.registry
    texts = OwnFamilies(OwnRegistry(fed.intake.metrics))

    def named() -> set[tuple[str, str]]:
        page = parse(b"".join(texts.pieces("text")).decode())
        samples = page["sidestep_engine_up"].samples
        return {(dict(labels)["engine"], dict(labels)["model_name"]) for _, labels in samples}

    assert named() == {("0", "m"), ("1", "m")}
    fed.send_hello("other", [info(7)])
    assert named() == {("0", "m"), ("1", "m"), ("7", "m")}
    discard(registry, registry.engines["e0"])
    registry.engines["e1"].labels["model_name"] = "other"
    registry.engines["e1"].renew_label_version()
    assert named() == {("1", "other"), ("7", "m")}


def test_the_series_of_unchanged_engines_are_not_counted_again() -> None:
    """Only series of changed engines are counted again; those of discarded engines are subtracted."""
    fed = fleet(40)
    registry = fed.intake.registry
    count = SeriesCount(registry)

    def total() -> float:
        (*_, (_, value)) = [one for one in count.reading() if one is not None]
        return value

    with counted() as first:
        wanted = sum(map(series_of, registry.engines.values()))
    with counted():
        assert total() == wanted
    with counted() as again:
        assert total() == wanted
    registry.engines["e3"].values[:] = [1] * len(registry.engines["e3"].values)
    registry.touch(registry.engines["e3"])
    grown = sum(map(series_of, registry.engines.values()))

    assert again.count < first.count / 3
    assert total() == grown > wanted
    discard(registry, registry.engines["e3"])
    assert total() == grown - series_of(fleet(1).intake.registry.engines["e0"]) - (grown - wanted)


HISTOGRAM = "vllm:request_prompt_tokens"
SOME = {
    f"{HISTOGRAM}_bucket",
    "vllm:request_success_total",
    "vllm:num_requests_running",
    "vllm:admission_rejections_total",
    "vllm:cache_config_info",
    "sidestep_kv_tracked_blocks",
    "sidestep_lora_requests",
    "sidestep_cudagraph_tokens_total",
    "own_total",
}
"""Families of each place where engines keep something, and one that they share."""

Page = Callable[[Registry], Callable[[], Iterator[Any]]]
PAGES: dict[str, Page] = {
    "text": lambda registry: partial(TextPage(registry).pieces, names=SOME),
    "pod": lambda registry: partial(TextPage(registry, SeriesFilter().for_pod).pieces, names=SOME),
    "dropped": lambda registry: partial(
        TextPage(registry, SeriesFilter(dropped_labels=frozenset({"model_name"}))).pieces,
        names=SOME,
    ),
    "json": lambda registry: partial(json_format.pieces, registry, SOME),
    "protobuf": lambda registry: partial(protobuf_page.pieces, registry, SOME),
}


@functools.cache
def thousand() -> Registry:
    """Return a registry of a thousand engines with values in every storage."""
    registry = Registry(
        {"vllm": compile_layout(DIALECTS["vllm"])},
        {},
        native=NativeSettings({}, lambda: 1.0, both=True),
    )
    for number in range(1000):
        said = info(number)
        said.info = {"cache_config": {"block_size": "16", "num_gpu_blocks": "7"}}
        change(registry, registry.register(said))
    return registry


def change(registry: Registry, engine: Engine) -> None:
    """Change every value of ``engine``."""
    engine.values[:] = [1 if value is None else value + 1 for value in engine.values]
    for slot in range(len(engine.histograms)):
        engine.histogram(slot).observe(0.5)
    for children, row in zip(engine.keyed, engine.layout.keyed, strict=True):
        key = ("x",) * len(row.own_labels)
        children[key] = children.get(key, 0) + 1
    for family in engine.open_families.values():
        for key, child in family.children.items():
            if isinstance(child, Histogram):
                child.observe(0.5)
            else:
                family.children[key] = child + 1
    registry.touch(engine)


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_of_a_thousand_engines_is_rendered_in_small_slices(kind: str) -> None:
    """The first page, a page after all changed, and one after nothing changed."""
    registry = thousand()
    page = PAGES[kind](registry)
    first = slices(page())
    for engine in registry.engines.values():
        change(registry, engine)

    # To copy one native histogram takes nine.
    most = 1.5 * MOST if kind == "protobuf" else MOST
    assert max(first) < most
    assert max(slices(page())) < most
    assert max(slices(page())) < most


@pytest.mark.parametrize("kind", ["counter", "histogram"])
@pytest.mark.parametrize("series_filter", [SeriesFilter(), SeriesFilter().for_pod])
def test_a_family_of_many_series_is_rendered_in_small_slices(
    kind: Kind, series_filter: SeriesFilter
) -> None:
    """A page of 26 engines with 60 label values each is rendered in slices."""
    fed = fleet(26)
    name = "own_total" if kind == "counter" else "own"
    for number in range(26):
        observed = [0.5] if kind == "histogram" else []
        some = [Sample([f"value {n}"], 1.0, observations=observed) for n in range(60)]
        family = Family(name, kind, ["l"], some, bounds=[1.0, 2.0] if observed else [])
        fed.items(f"s{number}", [encode_item(Samples(0, 1.0, [family]))])
    registry = fed.intake.registry
    merged = TextPage(registry, series_filter)
    # What families there are is looked up for the first page.
    list(merged.pieces(names={"none"}))

    assert max(slices(merged.pieces(names={name, "own_count"}))) < MOST


def test_a_hello_between_two_slices_of_a_shared_family_loses_no_series() -> None:
    """The Hello renews the label version of its engine."""
    registry = Registry({"vllm": compile_layout(DIALECTS["vllm"])}, {})
    engines = [registry.register(info(number)) for number in range(3)]
    name = "vllm:admission_rejections_total"
    slot = engines[0].layout.find(name).slots[0]
    texts = TextPage(registry)

    def count(factor: int) -> None:
        for number, engine in enumerate(engines):
            engine.values[slot] = factor * 10**number
            registry.touch(engine)

    def rejections(page: Iterable[Sequence[bytes]]) -> float:
        """Return the rejections of all engines and reasons."""
        found = b"".join(text for piece in page for text in piece)
        return sum(parse(found.decode())[name.removesuffix("_total")].samples.values())

    count(1)
    assert rejections(texts.pieces(names={name})) == 111
    count(5)
    page = texts.pieces(names={name})
    assert next(page) == []
    registry.register(info(0))

    assert rejections(page) == 555
    assert rejections(texts.pieces(names={name})) == 555


@pytest.mark.parametrize("kind", ["text", "json", "protobuf"])
def test_an_info_metric_is_of_the_moment_of_its_snapshot(kind: str) -> None:
    """A Hello that arrives before the family is written does not change its labels."""
    registry = Registry({"vllm": compile_layout(DIALECTS["vllm"])}, {})
    said = info(0)
    said.info = {"cache_config": {"block_size": "16"}}
    registry.register(said)
    name = "vllm:cache_config_info"
    pages: dict[str, Iterator[Any]] = {
        "text": TextPage(registry).pieces(names={name}),
        "json": json_format.pieces(registry, {name}),
        "protobuf": protobuf_page.pieces(registry, {name}),
    }
    # To here it is copied.
    assert not next(pages[kind])
    registry.register(info(0))
    found = [piece if isinstance(piece, bytes) else b"".join(piece) for piece in pages[kind]]

    assert b"block_size" in b"".join(found)


def test_an_engine_that_is_retired_during_a_render_counts_on_that_page() -> None:
    """Otherwise the sums of later families would decrease."""
    registry = fleet(3).intake.registry
    for engine in registry.engines.values():
        change(registry, engine)
    merged = TextPage(registry, SeriesFilter().for_pod)
    before = [text for piece in merged.pieces() for text in piece]
    page = merged.pieces()
    found = [text for _ in range(40) for text in next(page)]
    registry.retire(registry.engines["e1"])
    found += [text for piece in page for text in piece]

    def counts(texts: list[bytes]) -> dict[object, float]:
        families = parse(b"".join(texts).decode())
        return {
            sample: value
            for family in families.values()
            if family.kind != "gauge"
            for sample, value in family.samples.items()
        }

    assert counts(found) == counts(before)


def test_an_engine_that_came_and_went_between_two_pages_counts() -> None:
    """Its counters are in the sum of the engines that are exposed on both."""
    registry = fleet(2).intake.registry
    name = "vllm:num_preemptions_total"
    merged = TextPage(registry, SeriesFilter().for_pod)

    def total() -> float:
        texts = [text for piece in merged.pieces(names={name}) for text in piece]
        (family,) = parse(b"".join(texts).decode()).values()
        (value,) = family.samples.values()
        return value

    assert total() == 0
    passing = registry.register(info(2))
    change(registry, passing)
    registry.retire(passing)
    assert total() == 1


def test_sums_of_many_histograms_are_exact() -> None:
    """For any number of slices and any bounds."""
    for count in (1, 2, 101, 350):
        found: list[State] = [
            (BOUNDS[n % 7 == 3], [n, 2 * n, n % 5, 1], n / 8, {}) for n in range(count)
        ]
        bounds, counts, total, _ = made(aggregate_states(found))
        pairs = [dict(zip((*b, math.inf), accumulate(c), strict=True)) for b, c, *_ in found]

        assert bounds == tuple(sorted(set.intersection(*(set(b) for b, *_ in found))))
        assert [*accumulate(counts)] == [sum(p[b] for p in pairs) for b in (*bounds, math.inf)]
        assert total == sum(n / 8 for n in range(count))


BOUNDS = ((0.1, 1.0, 5.0), (0.1, 2.0, 5.0))


def test_native_buckets_of_a_shared_family_are_merged() -> None:
    """The aggregated histogram has the observations of all engines."""
    registry = Registry(
        {"vllm": compile_layout(DIALECTS["vllm"], legacy=True)},
        {},
        native=NativeSettings({}, lambda: 1.0),
    )
    name = "vllm:time_in_queue_requests"
    for number in range(50):
        engine = registry.register(info(number))
        engine.histogram(engine.layout.find(name).slots[0]).observe(1.0 + number % 2)
    page = b"".join(
        text for piece in protobuf_page.pieces(registry, {f"{name}_count"}) for text in piece
    )
    (family,) = metric_families.families(page)

    (metric,) = family.metric
    assert metric.histogram.sample_count == 50
    assert sorted(metric_families.buckets_of(metric.histogram).values()) == [25, 25]


async def test_work_yields_to_the_loop_before_a_slice_would_be_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The longest item so far predicts the next one; small items fill a slice."""
    now = 0.0
    turns: list[float] = []
    monkeypatch.setattr(cooperative, "time", SimpleNamespace(perf_counter=lambda: now))

    def work(durations: Iterable[float]) -> Iterator[float]:
        nonlocal now
        for duration in durations:
            now += duration
            yield duration

    async def others() -> None:
        while True:
            turns.append(now)
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    durations = [0.0001] * 25 + [0.0015, 0.0004, 0.0004, 0.0015] * 5
    found = await collect_in_slices(work(durations))
    task.cancel()

    held = [b - a for a, b in pairwise([*dict.fromkeys(turns), now])]
    assert found == durations
    # The first dear piece comes unforeseen.
    assert sorted(held)[-2] <= MAX_SLICE + 1e-9
    assert max(held) < SLICE + 0.0015 + 1e-9
    assert max(held[:2]) > SLICE


async def test_one_interruption_does_not_make_all_later_slices_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a page of thousands of small pieces would yield after each of them."""
    now = 0.0
    turns = 0
    monkeypatch.setattr(cooperative, "time", SimpleNamespace(perf_counter=lambda: now))

    def work() -> Iterator[None]:
        nonlocal now
        for duration in (0.02, *[0.00001] * 1000):
            now += duration
            yield

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await collect_in_slices(work())
    task.cancel()

    assert turns < 30
