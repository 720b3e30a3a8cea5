"""Concurrent pages of all formats while engines come, go, send Hello and count.

Each family of each page is what the registry had at one moment during the render, as a page
rendered in one go without a cache has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

import metric_families
from intakes import discard
from sidestep.catalog.layout_builder import compile_layout
from sidestep.catalog.slo import Objective, Objectives
from sidestep.engines.dialects import DIALECTS
from sidestep.exposition import (
    aggregated_series,
    json_format,
    label_cache,
    protobuf_page,
    sections,
)
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_page import TextPage, render
from sidestep.metrics.engine import Engine
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS, Registry
from sidestep.metrics.self_described import add_samples
from sidestep.protocol.messages import ENGINE_CORE, EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples

SHORT = {
    aggregated_series: ("PER_SLICE",),
    label_cache: ("PER_BATCH",),
    protobuf_page: ("PER_SLICE",),
    sections: ("PER_BATCH", "SERIES_PER_STEP"),
}
"""Sizes of the steps between which other work runs; small ones give it the most chances."""
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


def joined(found: Iterator[Any]) -> bytes:
    """Return a whole page."""
    return b"".join(piece if isinstance(piece, bytes) else b"".join(piece) for piece in found)


class World:
    """A registry that changes at random, and concurrent renders of its pages."""

    def __init__(self, random: Random) -> None:
        self.random = random
        layouts = {
            name: compile_layout(DIALECTS[name], legacy=True, common=True) for name in LABELS
        }
        native = NativeSettings({}, lambda: 1.0, both=True)
        self.registry = Registry(layouts, {}, native=native, objectives=Objectives(SLO))
        self.now = 0.0
        pod, dropped = (
            SeriesFilter().for_pod,
            SeriesFilter(dropped_labels=frozenset({"model_name"})),
        )
        texts = TextPage(self.registry)
        self.kept = {
            "pod": TextPage(self.registry, pod),
            "dropped": TextPage(self.registry, dropped),
            "thinned": TextPage(self.registry, SeriesFilter(bucket_thinning=2)),
        }
        self.pages: dict[str, Callable[[], Iterator[Any]]] = {
            "text": lambda: texts.pieces(names=NAMES),
            "openmetrics": lambda: texts.pieces(openmetrics=True, names=NAMES),
            "pod": lambda: self.kept["pod"].pieces(names=NAMES),
            "dropped": lambda: self.kept["dropped"].pieces(names=NAMES),
            "thinned": lambda: self.kept["thinned"].pieces(names=NAMES),
            "json": lambda: json_format.pieces(self.registry, NAMES),
            "protobuf": lambda: protobuf_page.pieces(self.registry, NAMES),
        }
        self.read = {"json": of_json, "protobuf": of_protobuf}
        self.past: dict[int, dict[str, Page]] = {}
        """Pages without a cache, by version of the registry."""
        for dialect, labels in LABELS.items():
            # The families of a page are those of the dialects when it begins.
            engine = self.registry.register(EngineInfo(f"{dialect}{STAYS}", dialect, labels))
            engine.streams.add(1)
        self.under_way: list[tuple[str, int, Iterator[Any], list[Any]]] = []
        self.finished = 0

    def fresh(self, kind: str) -> bytes:
        """Render a page without any cache."""
        if kind in self.kept:
            return joined(
                TextPage(self.registry, self.kept[kind].series_filter).pieces(names=NAMES)
            )
        if kind == "json":
            return joined(self.pages[kind]())
        if kind != "protobuf":
            return render(self.registry, names=NAMES)
        kept = [(e, e.label_cache) for e in self.registry.engines.values()]
        lent = [(h, h.encoded) for h in self.histograms()]
        for engine, _ in kept:
            engine.label_cache = {}
        for histogram, _ in lent:
            histogram.encoded = None
        page = joined(self.pages[kind]())
        for engine, marks in kept:
            engine.label_cache = marks
        for histogram, encoded in lent:
            histogram.encoded = encoded
        return page

    def histograms(self) -> Iterator[Any]:
        """Yield the histograms that cache their encoding."""
        for engine in self.registry.engines.values():
            children = [
                child
                for family in engine.open_families.values()
                for child in family.children.values()
            ]
            yield from (h for h in (*engine.histograms, *children) if hasattr(h, "encoded"))

    def note(self) -> None:
        """Render the present pages without a cache."""
        if self.registry.version not in self.past:
            self.past[self.registry.version] = {
                kind: self.read.get(kind, of_text)(self.fresh(kind))
                for kind in self.pages
                if kind != "openmetrics"
            }

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
            other.seen_at = self.now
        engine.seen_at = 0.0
        self.registry.expire(self.now)

    def throughput(self, engine: Engine) -> None:
        """Change a computed gauge."""
        engine.computed = self.random.choice(
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

    def step(self) -> None:
        """Begin, continue or abandon a render."""
        self.note()
        chance = self.random.random()
        if not self.under_way or (chance < 0.2 and len(self.under_way) < 6):
            kind = self.random.choice([*self.pages])
            self.under_way.append((kind, self.registry.version, self.pages[kind](), []))
            return
        place = self.random.randrange(len(self.under_way))
        kind, since, page, found = self.under_way[place]
        if chance > 0.99:
            del self.under_way[place]
            return
        for _ in range(self.random.choice([1, 1, 3, 20])):
            try:
                found.append(next(page))
            except StopIteration:
                del self.under_way[place]
                self.check(kind, since, joined(iter(found)))
                return

    def check(self, kind: str, since: int, page: bytes) -> None:
        """Check that each family is of one moment since the render began."""
        self.finished += 1
        read, known = (
            (of_text, "text") if kind == "openmetrics" else (self.read.get(kind, of_text), kind)
        )
        moments = [pages[known] for version, pages in self.past.items() if version >= since]
        shown = read(page)
        for name in shown.keys() | set().union(*moments):
            assert any(shown.get(name) == moment.get(name) for moment in moments), (kind, name)


@pytest.mark.parametrize("seed", range(8))
def test_each_family_of_each_page_is_of_one_moment(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With concurrent renders, some of which are abandoned."""
    for module, names in SHORT.items():
        for name in names:
            monkeypatch.setattr(module, name, 2)
    world = World(Random(seed))
    for _ in range(6):
        world.hello()
    for _ in range(400):
        world.step()
        if world.random.random() < 0.3:
            world.happen()
    world.under_way.clear()
    for kind in world.pages:
        world.note()
        world.check(kind, world.registry.version, joined(world.pages[kind]()))

    assert world.finished > 8
