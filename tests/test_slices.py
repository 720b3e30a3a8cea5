"""The event loop gets its turn after little work, however many engines there are."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

import metric_families
from intakes import Fed
from pages import parse
from sidestep.catalog.layout_builder import compile_layout
from sidestep.catalog.model import Kind
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.exposition import json_format as values
from sidestep.exposition import protobuf_page as protobuf
from sidestep.exposition.aggregate import merged_states
from sidestep.exposition.aggregated_text import Merged
from sidestep.exposition.negotiation import Format
from sidestep.exposition.own_families import AT_ONCE, OwnTexts
from sidestep.exposition.series_filter import Choice
from sidestep.exposition.text_page import Texts
from sidestep.ingest.engine_metrics import SeriesCount, series_of
from sidestep.metrics.engine import Engine
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.telemetry.cooperative import LONGEST, SLICE, collected
from sidestep.telemetry.self_metrics import OwnRegistry
from slices import MOST, counted, made, slices

MANY = 512
FORMS: tuple[Format, ...] = ("text", "openmetrics", "protobuf")


def info(number: int) -> EngineInfo:
    """One of many engines."""
    return EngineInfo(f"e{number}", "vllm", {"engine": str(number), "model_name": "m"})


def fleet(engines: int) -> Fed:
    """So many of them, a stream each."""
    fed = Fed()
    for number in range(engines):
        fed.greet(f"s{number % 250}", [info(n) for n in range(number % 250, engines, 250)])
    return fed


@functools.cache
def many() -> Fed:
    """``MANY``, which tests leave as they are."""
    return fleet(MANY)


@pytest.mark.parametrize("form", FORMS)
def test_own_families_come_some_samples_at_a_time(form: Format) -> None:
    """Those of engines and streams, too; also those of the first page."""
    texts = OwnTexts(OwnRegistry(many().intake.metrics))

    assert max(slices(texts.pieces(form))) < MOST


@pytest.mark.parametrize("form", FORMS)
def test_own_families_that_have_not_changed_are_not_written_again(form: Format) -> None:
    """Of an engine and a stream more, a page costs what asking for their values does."""
    costs = []
    for engines in (50, 250):
        texts = OwnTexts(OwnRegistry(fleet(engines).intake.metrics))
        list(texts.pieces(form))
        with counted() as calls:
            list(texts.pieces(form))
        costs.append(calls.count)

    assert costs[1] - costs[0] < 40 * 200


@pytest.mark.parametrize("form", FORMS)
def test_own_families_that_have_changed_are_written(form: Format) -> None:
    """Some of their samples, more of them, and fewer: each page is as one from nothing."""
    fed = fleet(2)
    texts = OwnTexts(OwnRegistry(fed.intake.metrics))

    def same() -> bool:
        """Whether a page is as one from nothing; without what collectors tell, which is last."""
        fresh = OwnTexts(OwnRegistry(fed.intake.metrics))
        found, wanted = ([*one.pieces(form)][:-1] for one in (texts, fresh))
        return b"".join(found) == b"".join(wanted)

    assert same()
    fed.intake.registry.engines["e1"].last_seen = 7.0
    assert same()
    for number in range(2, AT_ONCE + 10):
        fed.greet(f"s{number}", [info(number)])
    assert same()
    for number in range(5, AT_ONCE + 10):
        fed.intake.registry.discard(fed.intake.registry.engines[f"e{number}"])
    assert same()
    fed.intake.registry.engines["e1"].labels["model_name"] = "other"
    fed.intake.registry.engines["e1"].renew_label_version()
    assert same()


def test_own_families_name_the_engines_that_there_are() -> None:
    """One that comes, one that goes, and one that has other labels."""
    fed = fleet(2)
    registry = fed.intake.registry
    texts = OwnTexts(OwnRegistry(fed.intake.metrics))

    def named() -> set[tuple[str, str]]:
        page = parse(b"".join(texts.pieces("text")).decode())
        samples = page["sidestep_engine_up"].samples
        return {(dict(labels)["engine"], dict(labels)["model_name"]) for _, labels in samples}

    assert named() == {("0", "m"), ("1", "m")}
    fed.greet("other", [info(7)])
    assert named() == {("0", "m"), ("1", "m"), ("7", "m")}
    registry.discard(registry.engines["e0"])
    registry.engines["e1"].labels["model_name"] = "other"
    registry.engines["e1"].renew_label_version()
    assert named() == {("1", "other"), ("7", "m")}


def test_series_of_engines_that_have_not_changed_are_not_counted_again() -> None:
    """And of those that have, they are; whoever has gone counts no more."""
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
    registry.discard(registry.engines["e3"])
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
    "text": lambda registry: partial(Texts(registry).pieces, names=SOME),
    "pod": lambda registry: partial(Merged(registry, Choice().of_pod).pieces, names=SOME),
    "dropped": lambda registry: partial(
        Merged(registry, Choice(dropped=frozenset({"model_name"}))).pieces, names=SOME
    ),
    "json": lambda registry: partial(values.pieces, registry, SOME),
    "protobuf": lambda registry: partial(protobuf.pieces, registry, SOME),
}


@functools.cache
def thousand() -> Registry:
    """As many engines as one may hope for, with something of everything."""
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
    """Have all that ``engine`` shows be another."""
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
def test_a_page_of_a_thousand_engines_comes_in_small_slices(kind: str) -> None:
    """The first one, one after which all has changed, and one after which nothing has."""
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
@pytest.mark.parametrize("choice", [Choice(), Choice().of_pod])
def test_a_family_of_many_children_comes_in_small_slices(kind: Kind, choice: Choice) -> None:
    """However few engines have it: 26 with 60 label values each."""
    fed = fleet(26)
    name = "own_total" if kind == "counter" else "own"
    for number in range(26):
        observed = [0.5] if kind == "histogram" else []
        some = [Sample([f"value {n}"], 1.0, observations=observed) for n in range(60)]
        family = Family(name, kind, ["l"], some, bounds=[1.0, 2.0] if observed else [])
        fed.items(f"s{number}", [encode_item(Samples(0, 1.0, [family]))])
    registry = fed.intake.registry
    merged = Merged(registry, choice)
    # What families there are is looked up for the first page.
    list(merged.pieces(names={"none"}))

    assert max(slices(merged.pieces(names={name, "own_count"}))) < MOST


def test_of_a_shared_family_only_engines_that_have_changed_are_read_again() -> None:
    """The others' parts of its sums are kept."""
    registry = fleet(300).intake.registry
    page = partial(Texts(registry).pieces, names={"vllm:admission_rejections_total"})

    def cost(engines: Iterable[Engine]) -> int:
        for engine in engines:
            registry.touch(engine)
        with counted() as calls:
            list(page())
        return calls.count

    everyone = list(registry.engines.values())
    cost(everyone)
    assert cost(everyone[:1]) < 0.6 * cost(everyone)


def test_a_hello_between_two_slices_of_a_shared_family_costs_nobody_its_series() -> None:
    """Not on that page, and not on the next ones: an engine that says hello looks anew."""
    registry = Registry({"vllm": compile_layout(DIALECTS["vllm"])}, {})
    engines = [registry.register(info(number)) for number in range(3)]
    name = "vllm:admission_rejections_total"
    slot = engines[0].layout.find(name).slots[0]
    texts = Texts(registry)

    def count(factor: int) -> None:
        for number, engine in enumerate(engines):
            engine.values[slot] = factor * 10**number
            registry.touch(engine)

    def rejections(page: Iterable[Sequence[bytes]]) -> float:
        """Of all, by whatever reason."""
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
def test_what_an_info_said_stays_said_until_its_family_is_written(kind: str) -> None:
    """Whatever the next Hello says, or does not: a series without these labels nobody has."""
    registry = Registry({"vllm": compile_layout(DIALECTS["vllm"])}, {})
    said = info(0)
    said.info = {"cache_config": {"block_size": "16"}}
    registry.register(said)
    name = "vllm:cache_config_info"
    pages: dict[str, Iterator[Any]] = {
        "text": Texts(registry).pieces(names={name}),
        "json": values.pieces(registry, {name}),
        "protobuf": protobuf.pieces(registry, {name}),
    }
    # To here it is copied.
    assert not next(pages[kind])
    registry.register(info(0))
    found = [piece if isinstance(piece, bytes) else b"".join(piece) for piece in pages[kind]]

    assert b"block_size" in b"".join(found)


def test_a_reading_that_has_not_changed_is_not_written_again() -> None:
    """Whatever else of the engine has: it is told by its value."""
    registry = Registry({"vllm": compile_layout(DIALECTS["vllm"], legacy=True)}, {})
    engine = registry.register(info(0))
    engine.throughput = (3.0, 4.0)
    name = "vllm:avg_prompt_throughput_toks_per_s"
    texts = Texts(registry)

    def text() -> bytes:
        (_, found) = [text for piece in texts.pieces(names={name}) for text in piece]
        return found

    first = text()
    engine.throughput = (3.0, 5.0)
    registry.touch(engine)
    again = text()
    engine.throughput = (6.0, 5.0)
    registry.touch(engine)

    assert again is first
    assert text() == first.replace(b"3.0", b"6.0") != first


@pytest.mark.parametrize("kind", PAGES)
def test_a_family_is_of_one_moment(kind: str) -> None:
    """On every page, whatever comes between two slices of it."""
    registry = Registry(
        {"vllm": compile_layout(DIALECTS["vllm"])},
        {},
        native=NativeSettings({}, lambda: 1.0, both=True),
    )
    applier = Applier(registry)
    for number in range(70):
        engine = registry.register(info(number))
        family = Family("own_total", "counter", ["l"], [Sample(["x"], 0.0)])
        applier.apply(engine, Samples(0, 1.0, [family]))
        change(registry, engine)
    page = PAGES[kind](registry)

    found: list[bytes] = []
    for piece in page():
        found += piece if isinstance(piece, list) else [piece]
        for engine in registry.engines.values():
            change(registry, engine)
    for told in counts_of(kind, b"".join(found)):
        assert len(set(told)) == 1


def counts_of(kind: str, page: bytes) -> Iterator[list[float]]:
    """Of each family its values, or how many observations its histograms have."""
    if kind == "json":
        for family in json.loads(page):
            yield [sample.get("value", sample.get("count")) for sample in family["samples"]]
    elif kind == "protobuf":
        for found in metric_families.families(page):
            told = [
                (m.counter.value, m.gauge.value, m.histogram.sample_count) for m in found.metric
            ]
            yield [max(one) for one in told]
    else:
        for shown in parse(page.decode()).values():
            samples = shown.samples.items()
            yield [v for (name, _), v in samples if not name.endswith(("_bucket", "_sum"))]


def test_an_engine_that_goes_while_a_page_is_made_still_counts_on_it() -> None:
    """In the families that come later, too: else their sums would fall, and rise with the next."""
    registry = fleet(3).intake.registry
    for engine in registry.engines.values():
        change(registry, engine)
    merged = Merged(registry, Choice().of_pod)
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
    """The same ones are shown as on the page before, and what it counted is in their sum."""
    registry = fleet(2).intake.registry
    name = "vllm:num_preemptions_total"
    merged = Merged(registry, Choice().of_pod)

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
    """However many slices they are made in, and whatever bounds they have."""
    for count in (1, 2, 101, 350):
        found = [(BOUNDS[n % 7 == 3], [n, 2 * n, n % 5, 1], n / 8) for n in range(count)]
        bounds, counts, total = made(merged_states(found))
        pairs = [dict(zip((*b, math.inf), accumulate(c), strict=True)) for b, c, _ in found]

        assert bounds == tuple(sorted(set.intersection(*(set(b) for b, _, _ in found))))
        assert [*accumulate(counts)] == [sum(p[b] for p in pairs) for b in (*bounds, math.inf)]
        assert total == sum(n / 8 for n in range(count))


BOUNDS = ((0.1, 1.0, 5.0), (0.1, 2.0, 5.0))


def test_native_buckets_of_a_shared_family_are_merged() -> None:
    """In slices as well: what several engines observed is in the buckets of one histogram."""
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
        text for piece in protobuf.pieces(registry, {f"{name}_count"}) for text in piece
    )
    (family,) = metric_families.families(page)

    (metric,) = family.metric
    assert metric.histogram.sample_count == 50
    assert sorted(metric_families.buckets_of(metric.histogram).values()) == [25, 25]


async def test_the_loop_gets_its_turn_before_work_that_would_hold_it_for_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where one piece took most of a slice any next one may; small ones fill theirs."""
    now = 0.0
    turns: list[float] = []
    monkeypatch.setattr(
        "sidestep.telemetry.cooperative.time", SimpleNamespace(perf_counter=lambda: now)
    )

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
    found = await collected(work(durations))
    task.cancel()

    held = [b - a for a, b in pairwise([*dict.fromkeys(turns), now])]
    assert found == durations
    # The first dear piece comes unforeseen.
    assert sorted(held)[-2] <= LONGEST + 1e-9
    assert max(held) < SLICE + 0.0015 + 1e-9
    assert max(held[:2]) > SLICE


async def test_one_interruption_does_not_make_all_later_slices_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page of thousands of small pieces would wait for as many turns of everybody else."""
    now = 0.0
    turns = 0
    monkeypatch.setattr(
        "sidestep.telemetry.cooperative.time", SimpleNamespace(perf_counter=lambda: now)
    )

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
    await collected(work())
    task.cancel()

    assert turns < 30
