"""What is kept from page to page never shows: each page is as one made from nothing."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import aiohttp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

import metric_families
from conftest import Start
from pages import parse
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.exposition import json_format as values
from sidestep.exposition import protobuf_page as protobuf
from sidestep.exposition import protobuf_samples
from sidestep.exposition.aggregated_text import Merged
from sidestep.exposition.block_cache import Block, changed, renewed
from sidestep.exposition.compression import SHORT, Body, compress, pack
from sidestep.exposition.own_families import OwnTexts
from sidestep.exposition.selection import LabelTexts
from sidestep.exposition.series_filter import Choice
from sidestep.exposition.text_page import Texts, render
from sidestep.federation.summing import Sum
from sidestep.http.chunked_response import PIECE, pieces
from sidestep.metrics.engine import Engine
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.metrics.record_codec import decode_record, encode_record, totals_of
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS, Registry
from sidestep.metrics.self_described import add_samples
from sidestep.protocol.messages import ENGINE_CORE, EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.telemetry.self_metrics import SelfMetrics, own_registry

LAYOUTS = {
    name: compile_layout(dialect, legacy=True, common=True) for name, dialect in DIALECTS.items()
}
LABELS = {
    "vllm": {"engine": "0", "model_name": "m"},
    "sglang": {
        "engine_type": "unified",
        "model_name": "m",
        "moe_ep_rank": "0",
        "pp_rank": "0",
        "tp_rank": "0",
    },
    "triton": {"model": "m", "version": "1"},
}
NAMES = ("a", 'q"\\\n', "100%d", "ü\0")
BOUNDS = ([0.5, 1.0, 7.0], [0.1, 1.0])
CHOICES = (
    Choice(),
    Choice().of_pod,
    Choice(dropped=frozenset({"model_name"})),
    Choice(thinning=2),
)
SOME = ("vllm:e2e_request_latency_seconds_bucket", "sglang:num_running_reqs", "own_total", "nv_")
VALUES = st.sampled_from([None, 0, 1, 1.0, 0.25, 10**15, 1e22])
ENGINES = st.integers(0, 4)
SLOTS = st.integers(0, 2)
"""Few, so that the same ones change again and again."""
COUNTS = st.integers(0, 10**6)


FIRST: dict[str, Any] = {"number": 0, "name": "a", "bounds": BOUNDS[0], "info": "x", "features": []}


class Kept(RuleBasedStateMachine):
    """A registry to which anything happens, and pages that are made again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(LAYOUTS, {})
        self.applier = Applier(self.registry)
        self.texts = Texts(self.registry)
        self.merged = [Merged(self.registry, choice) for choice in CHOICES]
        self.under_way: list[Iterator[list[bytes]]] = []
        self.now = 0.0
        self.seen = -1

        for dialect in ("vllm", "sglang", "triton"):
            self.greet(**FIRST, dialect=dialect)
        self.greet(**{**FIRST, "number": 1}, dialect="vllm")

    def engine(self, number: int) -> Engine | None:
        """One of those that are there."""
        engines = list(self.registry.engines.values())
        return engines[number % len(engines)] if engines else None

    @rule(
        number=st.integers(0, 1),
        dialect=st.sampled_from(sorted(LABELS)),
        name=st.sampled_from(NAMES),
        bounds=st.sampled_from(BOUNDS),
        info=st.sampled_from(["", "x", "y"]),
        features=st.sampled_from([[], [ENGINE_CORE], ["lora", "spec_decode"]]),
    )
    def greet(
        self,
        *,
        number: int,
        dialect: str,
        name: str,
        bounds: list[float],
        info: str,
        features: list[str],
    ) -> None:
        """An engine comes, comes back, or says something else of itself."""
        labels = dict(LABELS[dialect])
        labels["model" if dialect == "triton" else "model_name"] = name
        told = {"cache_config": {"block_size": info}} if info else {}
        said = EngineInfo(f"{dialect}{number}", dialect, labels, info=told, features=features)
        said.bounds = {"request_latency": bounds}
        self.registry.register(said)

    @rule(number=ENGINES, slot=SLOTS, value=VALUES)
    def set_value(self, number: int, slot: int, value: float | None) -> None:
        """A number is another one, or none."""
        if (engine := self.engine(number)) is not None and engine.values:
            engine.values[slot % len(engine.values)] = value
            self.registry.touch(engine)

    @rule(number=ENGINES, slot=SLOTS, value=st.sampled_from([0.0, 0.3, 1.0, 1e4]), count=COUNTS)
    def observe(self, number: int, slot: int, value: float, count: int) -> None:
        """A histogram counts something."""
        if (engine := self.engine(number)) is not None and engine.histograms:
            engine.histogram(slot % len(engine.histograms)).observe_run(value, count)
            self.registry.touch(engine)

    @rule(number=ENGINES, slot=SLOTS, key=st.sampled_from(NAMES), count=COUNTS)
    def add(self, number: int, slot: int, key: str, count: int) -> None:
        """A child of open label values comes, grows or goes."""
        if (engine := self.engine(number)) is not None and engine.keyed:
            place = slot % len(engine.keyed)
            own = (key,) * len(engine.layout.keyed[place].own_labels)
            if not count:
                engine.keyed[place].pop(own, None)
            else:
                engine.keyed[place][own] = count
            self.registry.touch(engine)

    @rule(
        number=ENGINES,
        form=st.sampled_from(["a", "b"]),
        kind=st.sampled_from(["counter", "gauge", "histogram", "summary"]),
        label=st.sampled_from(["a", "100%d"]),
        value=st.sampled_from([1.0, 2.5]),
    )
    def describe(self, number: int, form: str, kind: Any, label: str, value: float) -> None:
        """An engine tells of a family of its own."""
        if (engine := self.engine(number)) is None:
            return
        suffix = "_total" if kind == "counter" else ""
        sample = Sample([label], value)
        bounds: list[float] = []
        if kind in ("histogram", "summary"):
            sample = Sample([label], observations=[value, 2 * value])
            bounds = [1.0, 2.0] if kind == "histogram" else []
        family = Family(f"own_{kind}_{form}{suffix}", kind, ["l"], [sample], bounds=bounds)
        self.applier.apply(engine, Samples(0, self.now, [family]))

    @rule(number=ENGINES, absent=st.booleans(), live=st.booleans())
    def hide(self, number: int, absent: bool, live: bool) -> None:
        """An engine is not there, or nobody tells of its state; or all is well again."""
        if (engine := self.engine(number)) is not None:
            engine.absent, engine.live = absent, live
            self.registry.touch(engine)

    @rule(number=ENGINES)
    def go(self, number: int) -> None:
        """An engine is not heard of any more, all others are."""
        if (gone := self.engine(number)) is not None:
            self.now += ENGINE_EXPIRES_SECONDS
            for engine in self.registry.engines.values():
                engine.seen_at = self.now
            gone.seen_at = 0.0
            self.registry.expire(self.now)

    @rule(openmetrics=st.booleans(), steps=st.integers(1, 120))
    def begin(self, openmetrics: bool, steps: int) -> None:
        """A page is begun, and goes on when other things have happened."""
        page = self.texts.pieces(openmetrics=openmetrics)
        for _ in range(steps):
            next(page, None)
        self.under_way.append(page)

    @precondition(lambda self: self.under_way)
    @rule(steps=st.integers(1, 400))
    def go_on(self, steps: int) -> None:
        """With a page that was begun before."""
        for _ in range(steps):
            if next(self.under_way[0], None) is None:
                del self.under_way[0]
                break

    @invariant()
    def pages_are_as_from_nothing(self) -> None:
        """In both formats, whole and in part."""
        if self.registry.version == self.seen:
            return
        self.seen = self.registry.version
        for openmetrics, names in ((False, ()), (True, SOME), (self.seen % 2 == 0, ())):
            page = joined(self.texts.pieces(openmetrics=openmetrics, names=names))
            assert page == render(self.registry, openmetrics=openmetrics, names=names)

    @rule(which=st.integers(0, len(CHOICES) - 1), openmetrics=st.booleans())
    def merged_pages_are_as_from_nothing(self, which: int, openmetrics: bool) -> None:
        """Likewise, what they keep."""
        merged = self.merged[which]
        fresh = Merged(self.registry, merged.choice)
        found = joined(merged.pieces(openmetrics=openmetrics))
        assert found == joined(fresh.pieces(openmetrics=openmetrics))

    def teardown(self) -> None:
        """Nothing is kept of engines that are not there."""
        joined(self.texts.pieces())
        looks = {engine.label_version for engine in self.registry.engines.values()}
        assert looks.issuperset(self.texts._labels._by_looks)


def joined(found: Iterator[list[bytes]]) -> bytes:
    """A page."""
    return b"".join(chain.from_iterable(found))


TestKept = Kept.TestCase
# Not made smaller: that would take longer than a test may.
TestKept.settings = settings(
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


def fleet(engines: int, dialect: str = "vllm") -> Registry:
    """Engines that have counted something."""
    registry = Registry(LAYOUTS, {})
    label = "model" if dialect == "triton" else "model_name"
    for number in range(engines):
        labels = {**LABELS[dialect], label: f"m{number}"}
        engine = registry.register(EngineInfo(f"e{number}", dialect, labels))
        engine.values = [number if value is None else value for value in engine.values]
        for slot in range(len(engine.histograms)):
            engine.histogram(slot).observe(number / 7)
        registry.touch(engine)
    return registry


def test_what_did_not_change_is_the_same_object() -> None:
    """A page after which nothing came costs nothing; after one engine, nearly nothing."""
    registry = fleet(40)
    texts = Texts(registry)
    first = [text for piece in texts.pieces() for text in piece]
    again = [text for piece in texts.pieces(openmetrics=False) for text in piece]
    assert all(one is other for one, other in zip(first, again, strict=True))

    engine = registry.engines["e3"]
    name = "vllm:e2e_request_latency_seconds"
    (slot,) = LAYOUTS["vllm"].find(name).slots
    engine.histogram(slot).observe(0.5)
    registry.touch(engine)
    after = [text for piece in texts.pieces() for text in piece]
    differ = [new for old, new in zip(first, after, strict=True) if old is not new]
    shared = {text.partition(b"{")[0] for text in differ if text in first}

    # What several engines have in common is written anew; a Same row shows the histogram again.
    written = {text.partition(b"{")[0] for text in differ} - shared
    assert f"{name}_bucket".encode() in written
    assert len(written) <= 2


def test_a_family_is_of_one_moment() -> None:
    """What comes while it is written is on the next page, however many blocks it has."""
    registry = fleet(300)
    name = "vllm:e2e_request_latency_seconds"
    (slot,) = LAYOUTS["vllm"].find(name).slots
    page = Texts(registry).pieces(names={name})
    found = [*next(page), *next(page)]
    for engine in registry.engines.values():
        engine.histogram(slot).observe(0.5)
        engine.values = [None] * len(engine.values)
        registry.touch(engine)
    rest = joined(page)

    assert found
    assert {
        value
        for (sample, _), value in parse((b"".join(found) + rest).decode())[name].samples.items()
        if sample.endswith("_count")
    } == {1.0}


def test_equal_numbers_of_two_kinds_are_written_as_they_are() -> None:
    """1 and 1.0 are equal, and two texts."""
    registry = fleet(2)
    texts = Texts(registry)
    for value in (1, 1.0, 1):
        for engine in registry.engines.values():
            engine.values = [value] * len(engine.values)
            registry.touch(engine)
        assert joined(texts.pieces()) == render(registry)


def test_an_alias_between_two_slices() -> None:
    """A state that another family has marked meanwhile is not taken for the one kept."""
    histogram = Histogram((1.0,))
    first = histogram.token(object())
    assert histogram.token(object()) is first
    histogram.observe(0.5)
    second = histogram.token(object())
    assert second is not first


@given(
    st.lists(st.binary(max_size=9), min_size=1, max_size=9),
    st.dictionaries(st.integers(0, 8), st.binary(max_size=9)),
)
def test_a_block_is_its_entries(texts: list[bytes], others: dict[int, bytes]) -> None:
    """Whatever of them is another; and what has not changed has its mark."""
    marks: list[object] = [object() for _ in texts]
    block = renewed(None, marks, dict(enumerate(texts)))
    assert changed(block, list(marks)) == ()
    some = {place: text for place, text in sorted(others.items()) if place < len(texts)}
    later = [object() if place in some else mark for place, mark in enumerate(marks)]
    assert [*changed(block, later)] == [*some]
    found = renewed(block, later, some)
    wanted = [some.get(place, text) for place, text in enumerate(texts)]
    assert found == Block(later, [len(text) for text in wanted], b"".join(wanted))


@given(st.lists(st.binary(max_size=3 * PIECE), max_size=6))
@settings(max_examples=30, deadline=None)
def test_pieces_are_the_parts(parts: list[bytes]) -> None:
    """Neither long nor, but for the last, very short."""
    found = [bytes(piece) for piece in pieces(parts)]
    assert b"".join(found) == b"".join(parts)
    assert all(len(piece) <= PIECE for piece in found)


@given(st.lists(st.binary(max_size=2000), max_size=4))
@settings(deadline=None)
def test_gzip_of_parts(parts: list[bytes]) -> None:
    """Any reader takes the parts of the gzip for the parts."""
    assert gzip.decompress(b"".join(compress(parts))) == b"".join(parts)


async def test_a_body_is_packed_once() -> None:
    """All requests share the same bytes."""
    body = Body([b"engines " * 1000, b"own"])
    one, other = await asyncio.gather(body.packed(), body.packed())

    assert one is other
    assert gzip.decompress(b"".join(one)) == b"engines " * 1000 + b"own"


async def test_short_parts_are_packed_without_a_thread() -> None:
    """To wake one up takes longer."""
    before = threading.active_count()
    await pack([b"x" * SHORT])
    assert threading.active_count() == before
    await pack([b"x" * SHORT, b"x"])
    assert threading.active_count() == before + 1


def test_the_exporters_own_families_are_as_prometheus_client_has_them() -> None:
    """Whatever their labels and values; in both formats, whole and in part."""
    metrics = SelfMetrics()
    metrics.add("sidestep_messages_total", 3, 'he"l\\lo\n')
    metrics.add("sidestep_items_total", 1e15)
    metrics.set("sidestep_scrape_duration_seconds", 0.125)
    metrics.set("sidestep_snapshot_bytes", float("inf"))
    metrics.read("sidestep_http_connections", lambda: iter([((), 7)]))
    registry = own_registry(metrics, [])
    texts = OwnTexts(registry)

    def stable(page: bytes) -> list[str]:
        """Without what is another whenever it is asked for."""
        return [
            line
            for line in page.decode().splitlines()
            if not line.startswith(("process_", "python_gc_"))
        ]

    def metrics_of(page: bytes) -> list[Any]:
        """Likewise."""
        found = metric_families.families(page)
        return [family for family in found if not family.name.startswith(("process_", "python_gc"))]

    for _ in range(2):
        assert stable(b"".join(texts.pieces("text"))) == stable(generate_latest(registry))
        theirs = generate_openmetrics(registry)  # type: ignore[no-untyped-call]
        assert stable(b"".join(texts.pieces("openmetrics"))) == stable(theirs)
        ours = metrics_of(b"".join(texts.pieces("protobuf")))
        assert ours == metrics_of(protobuf_samples.generate(registry))
    part = b"".join(texts.pieces("text", {"sidestep_items_total"}))
    assert parse(part.decode())["sidestep_items"].samples


def test_values_are_the_pages() -> None:
    """JSON tells the same numbers as the text."""
    registry = fleet(3)
    told = json.loads(b"".join(values.pieces(registry)))
    page = parse(render(registry).decode())

    def base(family: dict[str, Any]) -> str:
        name: str = family["name"]
        return name.removesuffix("_total") if family["type"] == "counter" else name

    assert {base(family) for family in told} == set(page)
    for family in told:
        found = page[base(family)].samples
        for sample in family["samples"]:
            labels = tuple(sorted(sample["labels"].items()))
            end = "" if "value" in sample else "_count"
            value = sample["value"] if "value" in sample else sample["count"]
            assert found[family["name"] + end, labels] == value
    assert json.loads(b"".join(values.pieces(Registry(LAYOUTS, {})))) == []


def test_labels_of_engines_that_went_are_forgotten() -> None:
    """Only what is asked for and still there is kept."""
    registry = fleet(3)
    labels = LabelTexts()
    texts = Texts(registry)
    joined(texts.pieces())
    assert len(texts._labels._by_looks) == 3
    for number in (0, 1):
        registry._hide(registry.engines[f"e{number}"])
    registry.version += 1
    joined(texts.pieces())
    assert len(texts._labels._by_looks) == 1
    labels.keep([])
    assert labels._by_looks == {}


async def test_a_long_page_is_sent_in_parts(start: Start) -> None:
    """Its length is said first; whoever asks for its head gets nothing else."""
    async with start() as exporter, aiohttp.ClientSession(auto_decompress=False) as session:
        for number in range(90):
            labels = {**LABELS["vllm"], "engine": str(number)}
            engine = exporter.registry.register(EngineInfo(f"e{number}", "vllm", labels))
            # One that was never heard of leaves the page with the next second.
            engine.seen_at = time.monotonic()
        plain: dict[str, str] = {"Accept-Encoding": "identity"}
        url = f"{exporter.url}?name[]=vllm:e2e_request_latency_seconds_bucket"
        async with session.get(url, headers=plain) as answer:
            page = await answer.read()
            assert int(answer.headers["Content-Length"]) == len(page) > 2 * PIECE
        async with session.get(url, headers={"Accept-Encoding": "gzip"}) as answer:
            assert gzip.decompress(await answer.read()) == page
        async with session.head(url, headers=plain) as answer:
            assert int(answer.headers["Content-Length"]) == len(page)
            assert await answer.read() == b""
        # The connection is as good as before.
        async with session.get(url, headers=plain) as answer:
            assert await answer.read() == page
        assert page == render(exporter.registry, names={"vllm:e2e_request_latency_seconds"})


def test_engines_whose_bounds_have_none_in_common() -> None:
    """One bucket is left of such a histogram, and the page is there."""
    registry = Registry(LAYOUTS, {})
    name = "vllm:time_in_queue_requests"
    (slot,) = LAYOUTS["vllm"].find(name).slots
    for number, bounds in enumerate(([1.0, 2.0], [3.0, 4.0])):
        labels = {"engine": str(number), "model_name": "m"}
        told = EngineInfo(f"e{number}", "vllm", labels, bounds={"request_latency": bounds})
        registry.register(told).histogram(slot).observe(1.5)
    found = {
        (sample, dict(labels).get("le")): value
        for (sample, labels), value in parse(render(registry).decode())[name].samples.items()
    }
    assert found == {
        (f"{name}_bucket", "+Inf"): 2.0,
        (f"{name}_count", None): 2.0,
        (f"{name}_sum", None): 3.0,
    }


def test_labels_that_a_forwarded_engine_calls_something_else() -> None:
    """Its series are replaced in place, and their labels are not those of before."""
    name, own = "sglang:prompt_tokens_total", ["is_streaming"]
    info = EngineInfo("e", "sglang", LABELS["sglang"])
    registry = Registry(LAYOUTS, {}, native=NativeSettings({}, lambda: 0.0))
    engine = registry.register(info)
    texts = Texts(registry)
    for label in ("tenant", "customer"):
        counting = Registry(LAYOUTS, {})
        counted = counting.register(info)
        sample = Sample(["true", "x"], 3)
        family = Family(name, "counter", [*own, label], [sample])
        add_samples(counting, counted, Samples(0, 0.0, [family]))
        record = decode_record(encode_record(counted, totals_of(counted)))
        total = Sum(registry, info)
        for _ in (*total.add(record, gauges=True), *total.keep(engine)):
            pass
        assert total.show(registry, engine) is None
        page = joined(texts.pieces())
        assert page == render(registry)
        assert f'{label}="x"'.encode() in page
        binary = b"".join(b"".join(piece) for piece in protobuf.pieces(registry))
        assert label.encode() in binary
