"""Pages of all formats while engines come, go, send Hello and count.

Each page is written some time after its values were copied, and is the page of that moment as
without a cache.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import msgspec
import pytest

import metric_families
from intakes import discard
from rendered import copied
from sidestep.catalog.layout_builder import compile_layout
from sidestep.catalog.slo import Objective, Objectives
from sidestep.engines.dialects import DIALECTS
from sidestep.exposition import json_format
from sidestep.exposition.engine_values import EngineCopier, RegistryValues
from sidestep.exposition.pages import SLICE, PageCopier
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.exposition.protobuf_page import ProtobufPage
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_page import TextPage
from sidestep.metrics.computed_gauges import SetGauges
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import SeriesSettings
from sidestep.metrics.exposed_engines import ENGINE_EXPIRES_SECONDS
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.metrics.registry import Registry
from sidestep.metrics.self_described import add_samples
from sidestep.protocol.messages import ENGINE_CORE, EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.telemetry.self_metrics import SelfMetrics, own_registry

OBSERVED = (
    "vllm:e2e_request_latency_seconds",
    "vllm:time_in_queue_requests",
    "own_seconds",
    "own_summary",
    "sglang:e2e_request_latency_seconds",
)
NUMBERS = (
    "vllm:request_success_total",
    "vllm:num_requests_running",
    "vllm:admission_rejections_total",
    "vllm:cache_config_info",
    "vllm:avg_prompt_throughput_toks_per_s",
    "vllm:lora_requests_info",
    "sglang:num_running_reqs",
    "sglang:num_requests_total",
    "sidestep_saturation_ratio",
    "sidestep_slo_requests_total",
    "nv_inference_request_success",
    "nv_inference_queue_duration_us",
    "own_total",
    "own_gauge",
)
MODELS = ("m", "n", 'q"\\\n', "100%d", "ü\0")
"""Label values, some of which need escapes or look like a placeholder."""
VALUES = (None, 0, 1, 1.0, 0.25, 10**15, 1e22)
"""Numbers; 1 and 1.0 are equal but have different text."""
NAMES = frozenset({*OBSERVED, *NUMBERS})
"""Families of each place where engines keep something, shared and not."""
LABELS = {
    "triton": {"model": "m", "version": "1"},
    "vllm": {"engine": "0", "model_name": "m"},
    "sglang": {
        "engine_type": "unified", "model_name": "m", "moe_ep_rank": "0", "pp_rank": "0", "tp_rank": "0",
    },
}  # fmt: skip
SLO = [Objective("ttft", ("vllm:time_to_first_token_seconds",), 0.5), Objective("availability")]

LAST = ',le="+Inf"'

STAYS = "9"
"""Number of the engines that always are there."""

Page = dict[str, Any]
"""Samples by family, in a form that is equal for equal pages."""
Write = Callable[[RegistryValues], bytes]
Writers = Mapping[str, Write]
"""Functions that write pages, by form."""


def of_text(page: bytes) -> Page:
    """Parse a text page; check that the last bucket of a histogram has all its observations."""
    found: Page = {}
    for line in page.decode().splitlines():
        if line.startswith("# TYPE"):
            # The name has the suffix in one of the formats.
            name = line.split()[2].removesuffix("_total")
            assert name not in found
            found[name] = {}
        elif not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            assert series not in found[name]
            found[name][series] = value
    for samples in found.values():
        for series, value in samples.items():
            if LAST in series:
                count = series.replace(LAST, "").replace("_bucket{", "_count{").replace("{}", "")
                assert samples[count] == value
    return found


def of_json(page: bytes) -> Page:
    """Parse a JSON page."""
    return {
        family["name"]: sorted(
            (sorted(s["labels"].items()), s.get("value"), s.get("buckets"), s.get("sum"))
            for s in family["samples"]
        )
        for family in json.loads(page)
    }


def of_protobuf(page: bytes) -> Page:
    """Parse a protobuf page; check that native buckets have all observations."""
    found: Page = {}
    for family in metric_families.families(page):
        found[family.name] = sorted(str(metric) for metric in family.metric)
        for metric in family.metric:
            if metric.histogram.positive_span or metric.histogram.zero_count:
                native = sum(metric_families.buckets_of(metric.histogram).values())
                assert native + metric.histogram.zero_count == metric.histogram.sample_count
    return found


class World:
    """A registry that changes at random, and copies of it that are not written yet."""

    def __init__(self, random: Random) -> None:
        self.random = random
        layouts = {
            name: compile_layout(DIALECTS[name], legacy=True, common=True) for name in LABELS
        }
        native = NativeSettings({}, lambda: 1.0, both=True)
        series = SeriesSettings(native=native, objectives=Objectives(SLO))
        self.registry = Registry(layouts, series)
        self.now = 0.0
        self.filters = {
            "text": SeriesFilter(),
            "pod": SeriesFilter().for_pod,
            "dropped": SeriesFilter(dropped_labels=frozenset({"model_name"})),
            "thinned": SeriesFilter(bucket_thinning=2),
        }
        self.copier = EngineCopier(self.registry)
        self.kept: Writers = self.writers()
        self.read = {"json": of_json, "protobuf": of_protobuf}
        for dialect, labels in LABELS.items():
            # The families of a page are those of the dialects when it begins.
            engine = self.registry.register(EngineInfo(f"{dialect}{STAYS}", dialect, labels))
            engine.feeds.streams.add(1)
        self.waiting: list[tuple[str, RegistryValues, Page]] = []
        """Form of a page, its values, and the page as it should be."""
        self.finished = 0

    def writers(self) -> Writers:
        """Return functions that write pages, with new caches."""
        texts = {kind: TextPage(chosen) for kind, chosen in self.filters.items()}
        protobuf = ProtobufPage()

        def text(kind: str, *, openmetrics: bool = False) -> Write:
            write = texts[kind].write
            return lambda values: b"".join(write(values, openmetrics=openmetrics, names=NAMES))

        return {
            **{kind: text(kind) for kind in self.filters},
            "openmetrics": text("text", openmetrics=True),
            "json": lambda values: json_format.encode(values, names=NAMES),
            "protobuf": lambda values: b"".join(protobuf.write(values, NAMES)),
        }

    def parsed(self, kind: str, page: bytes) -> Page:
        """Parse a page."""
        return self.read.get(kind, of_text)(page)

    def engine(self) -> Engine | None:
        """Return a random engine."""
        engines = list(self.registry.engines.values())
        return self.random.choice(engines) if engines else None

    def happen(self) -> None:
        """Change something."""
        engine = self.engine()
        if engine is None or self.random.random() < 0.15:
            self.hello()
            return
        often = [self.count, self.observe] * 2
        act = self.random.choice([*often, self.hide, self.go, self.describe, self.throughput])
        act(engine)
        self.registry.touch(engine)

    def hello(self) -> None:
        """Register an engine, or describe it again; some have equal labels."""
        random = self.random
        dialect = random.choice(["vllm", "vllm", "sglang", "triton"])
        number = random.randrange(4)
        name = "model" if dialect == "triton" else "model_name"
        labels = {**LABELS[dialect], name: random.choice(MODELS)}
        if dialect == "vllm":
            labels["engine"] = str(number // 2)
        said = EngineInfo(f"{dialect}{number}", dialect, labels)
        said.info = (
            {"cache_config": {"block_size": random.choice("18")}} if random.random() < 0.7 else {}
        )
        said.features = random.choice([[], [ENGINE_CORE], ["lora", "spec_decode"]])
        said.bounds = {"request_latency": random.choice([[0.5, 1.0], [0.1, 1.0]])}
        self.registry.register(said)

    def count(self, engine: Engine) -> None:
        """Change numbers."""
        for name in NUMBERS:
            placed = engine.layout.find(name) if name in self.rows(engine) else None
            if placed is None or self.random.random() < 0.3:
                continue
            if placed.storage == "scalars":
                slot = self.random.choice(placed.slots)
                engine.values[slot] = self.random.choice([*VALUES, (engine.values[slot] or 0) + 1])
            elif placed.storage == "keyed" and name != "sidestep_slo_requests_total":
                children = engine.keyed[placed.slots[0]]
                key = (self.random.choice("ab"),) * len(placed.row.own_labels)
                if self.random.random() < 0.2:
                    children.pop(key, None)
                else:
                    children[key] = children.get(key, 0) + 1

    def rows(self, engine: Engine) -> set[str]:
        """Return the rows of the engine's dialect."""
        return {placed.row.name for placed in engine.layout.assignments}

    def observe(self, engine: Engine) -> None:
        """Observe values."""
        for name in OBSERVED:
            if name in self.rows(engine):
                placed = engine.layout.find(name)
                for slot in placed.slots if placed.storage == "histogram" else ():
                    engine.histogram(slot).observe(self.random.choice([0.0, 0.3, 0.7, 9.0]))

    def hide(self, engine: Engine) -> None:
        """Make an engine absent or not live, or undo it."""
        engine.absent, engine.live = self.random.random() < 0.2, self.random.random() < 0.7

    def go(self, engine: Engine) -> None:
        """Expire or discard an engine."""
        if engine.id.endswith(STAYS):
            return
        if self.random.random() < 0.3:
            discard(self.registry, engine)
            return
        self.now += ENGINE_EXPIRES_SECONDS
        for other in self.registry.engines.values():
            other.feeds.seen_at = self.now
        engine.feeds.seen_at = 0.0
        self.registry.expire(self.now)

    def throughput(self, engine: Engine) -> None:
        """Change a computed gauge."""
        engine.part(SetGauges).values = self.random.choice(
            [{}, {"prompt_throughput": 1.0}, {"prompt_throughput": 2.0}]
        )

    def describe(self, engine: Engine) -> None:
        """Add samples of self-described families."""
        label = [self.random.choice("ab")]
        found = [
            Family("own_total", "counter", ["l"], [Sample(label, 1.0)]),
            Family("own_gauge", "gauge", ["l"], [Sample(label, 2.5)]),
            Family("own_summary", "summary", ["l"], [Sample(label, observations=[0.3])]),
            Family(
                "own_seconds", "histogram", ["l"], [Sample(label, observations=[0.3])], bounds=[1.0]
            ),
        ]
        if engine.layout.dialect == "sglang":
            name, observed = (
                "sglang:e2e_request_latency_seconds",
                Sample([], observations=[0.3, 7.0]),
            )
            bounds = list(engine.description.bounds[engine.layout.find(name).row.buckets])
            found.append(Family(name, "histogram", [], [observed], bounds=bounds))
            found.append(Family("sglang:num_requests_total", "counter", [], [Sample([], 1.0)]))
        add_samples(self.registry, engine, Samples(0, 1.0, [self.random.choice(found)]))

    def copy(self) -> None:
        """Copy values for a page, and note the page that a new exporter would write of them.

        Engines that were copied in slices before may have changed since.
        """
        kind = self.random.choice([*self.kept])
        for engine in [*self.registry.engines.values()]:
            if self.random.random() < 0.5:
                self.copier.prepare(engine)
            if self.random.random() < 0.1:
                self.happen()
        fresh = self.writers()[kind](copied(self.registry, with_gone=True))
        values = self.copier.copy(with_gone=True)
        self.waiting.append((kind, values, self.parsed(kind, fresh)))

    def write(self) -> None:
        """Write the page that waits longest, as the only thread that writes does."""
        kind, values, wanted = self.waiting.pop(0)
        assert self.parsed(kind, self.kept[kind](values)) == wanted, kind
        self.finished += 1


@pytest.mark.parametrize("seed", range(4))
def test_each_page_is_of_the_moment_of_its_copy(seed: int) -> None:
    """Whatever changes until it is written."""
    world = World(Random(seed))
    for _ in range(6):
        world.hello()
    for _ in range(400):
        chance = world.random.random()
        if chance < 0.6:
            world.happen()
        elif chance < 0.8 or not world.waiting:
            world.copy()
        else:
            world.write()
    while world.waiting:
        world.write()

    assert world.finished > 50


async def test_the_loop_serves_others_while_engines_are_copied() -> None:
    """At least once for each slice."""
    world = World(Random(0))
    info = EngineInfo("", "vllm", LABELS["vllm"])
    for number in range(4 * SLICE):
        world.registry.register(msgspec.structs.replace(info, id=str(number)))
    passthrough = PassthroughRegistry(world.registry.names)
    copier = PageCopier(world.registry, passthrough, own_registry(SelfMetrics(), ()))
    passes = 0
    copying = asyncio.create_task(copier.copy())
    while not copying.done():
        await asyncio.sleep(0)
        passes += 1

    assert passes >= 4
    assert len((await copying).engines.versions) >= 4 * SLICE
