"""Pages of all kinds in the making at once, while engines come, go, say hello and count.

Each family of each page is what the registry had at one moment while the page was made, as a page
from nothing has it, which keeps nothing and is made in one go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

import metric_families
from sidestep.catalog.layout_builder import compile_layout
from sidestep.catalog.slo import Objective, Objectives
from sidestep.engines.dialects import DIALECTS
from sidestep.exposition import json_format as values
from sidestep.exposition import protobuf_page as protobuf
from sidestep.exposition.aggregated_text import Merged
from sidestep.exposition.series_filter import Choice
from sidestep.exposition.text_page import Texts, render
from sidestep.metrics.engine import Engine
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS, Registry
from sidestep.metrics.self_described import add_samples
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples

SHORT = {
    "copies": ("AT_ONCE",),
    "render.groups": ("AT_ONCE",),
    "render.merging": ("AT_ONCE",),
    "render.open_sections": ("AT_ONCE", "ENGINES"),
    "render.protobuf": ("AT_ONCE",),
    "render.sections": ("HISTOGRAMS", "SCALARS"),
    "render.values": ("AT_ONCE",),
}
"""What decides how much is done between two turns: as little as can be."""
OBSERVED = (
    "vllm:e2e_request_latency_seconds",
    "vllm:time_in_queue_requests",
    "own_seconds",
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
    "own_total",
)
NAMES = frozenset({*OBSERVED, *NUMBERS})
"""Families of each place where engines keep something, shared and not."""
LABELS = {
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
"""By family, in a form of which no two pages with other samples have the same."""


def of_text(page: bytes) -> Page:
    """A text page; every histogram counts in its last bucket what it counts in all."""
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
    """A JSON page."""
    return {
        family["name"]: sorted(
            (sorted(s["labels"].items()), s.get("value"), s.get("buckets"), s.get("sum"))
            for s in family["samples"]
        )
        for family in json.loads(page)
    }


def of_protobuf(page: bytes) -> Page:
    """A page in protobuf; native and classic buckets of a histogram count the same."""
    found: Page = {}
    for family in metric_families.families(page):
        found[family.name] = sorted(str(metric) for metric in family.metric)
        for metric in family.metric:
            if metric.histogram.positive_span or metric.histogram.zero_count:
                native = sum(metric_families.buckets_of(metric.histogram).values())
                assert native + metric.histogram.zero_count == metric.histogram.sample_count
    return found


def joined(found: Iterator[Any]) -> bytes:
    """A whole page."""
    return b"".join(piece if isinstance(piece, bytes) else b"".join(piece) for piece in found)


class World:
    """A registry to which anything happens, and whoever asks it for pages."""

    def __init__(self, random: Random) -> None:
        self.random = random
        layouts = {name: compile_layout(DIALECTS[name], legacy=True) for name in ("vllm", "sglang")}
        native = NativeSettings({}, lambda: 1.0, both=True)
        self.registry = Registry(layouts, {}, native=native, objectives=Objectives(SLO))
        self.now = 0.0
        pod, dropped = Choice().of_pod, Choice(dropped=frozenset({"model_name"}))
        texts = Texts(self.registry)
        self.kept = {"pod": Merged(self.registry, pod), "dropped": Merged(self.registry, dropped)}
        self.pages: dict[str, Callable[[], Iterator[Any]]] = {
            "text": lambda: texts.pieces(names=NAMES),
            "openmetrics": lambda: texts.pieces(openmetrics=True, names=NAMES),
            "pod": lambda: self.kept["pod"].pieces(names=NAMES),
            "dropped": lambda: self.kept["dropped"].pieces(names=NAMES),
            "json": lambda: values.pieces(self.registry, NAMES),
            "protobuf": lambda: protobuf.pieces(self.registry, NAMES),
        }
        self.read = {"json": of_json, "protobuf": of_protobuf}
        self.past: dict[int, dict[str, Page]] = {}
        """By version of the registry: the pages from nothing."""
        for dialect, labels in LABELS.items():
            # What a page shows of families is seen by the dialects that are spoken when it begins.
            engine = self.registry.register(EngineInfo(f"{dialect}{STAYS}", dialect, labels))
            engine.streams.add(1)
        self.under_way: list[tuple[str, int, Iterator[Any], list[Any]]] = []
        self.finished = 0

    def fresh(self, kind: str) -> bytes:
        """The page from nothing, for which nothing that is kept is used."""
        if kind in self.kept:
            return joined(Merged(self.registry, self.kept[kind].choice).pieces(names=NAMES))
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
        """All that keep their bytes."""
        for engine in self.registry.engines.values():
            children = [
                child
                for family in engine.open_families.values()
                for child in family.children.values()
            ]
            yield from (h for h in (*engine.histograms, *children) if hasattr(h, "encoded"))

    def note(self) -> None:
        """Remember how pages from nothing look now."""
        if self.registry.version not in self.past:
            self.past[self.registry.version] = {
                kind: self.read.get(kind, of_text)(self.fresh(kind))
                for kind in self.pages
                if kind != "openmetrics"
            }

    def engine(self) -> Engine | None:
        """One of those that are there."""
        engines = list(self.registry.engines.values())
        return self.random.choice(engines) if engines else None

    def happen(self) -> None:
        """Something does."""
        engine = self.engine()
        if engine is None or self.random.random() < 0.15:
            self.hello()
            return
        often = [self.count, self.observe] * 2
        act = self.random.choice([*often, self.hide, self.go, self.describe, self.throughput])
        act(engine)
        self.registry.touch(engine)

    def hello(self) -> None:
        """An engine comes, comes back, or says something else of itself; some look alike."""
        random = self.random
        dialect = random.choice(["vllm", "vllm", "sglang"])
        number = random.randrange(4)
        labels = {**LABELS[dialect], "model_name": random.choice("mn")}
        if dialect == "vllm":
            labels["engine"] = str(number // 2)
        said = EngineInfo(f"{dialect}{number}", dialect, labels)
        said.info = (
            {"cache_config": {"block_size": random.choice("18")}} if random.random() < 0.7 else {}
        )
        said.bounds = {"request_latency": random.choice([[0.5, 1.0], [0.1, 1.0]])}
        self.registry.register(said)

    def count(self, engine: Engine) -> None:
        """Numbers grow."""
        for name in NUMBERS:
            placed = engine.layout.find(name) if name in self.rows(engine) else None
            if placed is None or self.random.random() < 0.3:
                continue
            if placed.storage == "scalars":
                slot = self.random.choice(placed.slots)
                engine.values[slot] = (engine.values[slot] or 0) + 1
            elif placed.storage == "keyed" and name != "sidestep_slo_requests_total":
                children = engine.keyed[placed.slots[0]]
                key = (self.random.choice("ab"),) * len(placed.row.own_labels)
                children[key] = children.get(key, 0) + 1

    def rows(self, engine: Engine) -> set[str]:
        """What the engine's dialect has."""
        return {placed.row.name for placed in engine.layout.assignments}

    def observe(self, engine: Engine) -> None:
        """Histograms count."""
        for name in OBSERVED:
            if name in self.rows(engine):
                placed = engine.layout.find(name)
                for slot in placed.slots if placed.storage == "histogram" else ():
                    engine.histogram(slot).observe(self.random.choice([0.0, 0.3, 0.7, 9.0]))

    def hide(self, engine: Engine) -> None:
        """Its server does not have it, or nobody tells of its state; or all is well again."""
        engine.absent, engine.live = self.random.random() < 0.2, self.random.random() < 0.7

    def go(self, engine: Engine) -> None:
        """It is not heard of any more, or forgotten."""
        if engine.id.endswith(STAYS):
            return
        if self.random.random() < 0.3:
            self.registry.discard(engine)
            return
        self.now += ENGINE_EXPIRES_SECONDS
        for other in self.registry.engines.values():
            other.seen_at = self.now
        engine.seen_at = 0.0
        self.registry.expire(self.now)

    def throughput(self, engine: Engine) -> None:
        """A reading is another."""
        engine.throughput = self.random.choice([None, (1.0, 2.0), (2.0, 1.0)])

    def describe(self, engine: Engine) -> None:
        """It tells of families by itself."""
        label = [self.random.choice("ab")]
        found = [
            Family("own_total", "counter", ["l"], [Sample(label, 1.0)]),
            Family(
                "own_seconds", "histogram", ["l"], [Sample(label, observations=[0.3])], bounds=[1.0]
            ),
        ]
        if engine.layout.dialect == "sglang":
            name, observed = (
                "sglang:e2e_request_latency_seconds",
                Sample([], observations=[0.3, 7.0]),
            )
            bounds = list(engine.bounds[engine.layout.find(name).row.buckets])
            found.append(Family(name, "histogram", [], [observed], bounds=bounds))
            found.append(Family("sglang:num_requests_total", "counter", [], [Sample([], 1.0)]))
        add_samples(self.registry, engine, Samples(0, 1.0, [self.random.choice(found)]))

    def step(self) -> None:
        """A page begins, goes on, or is given up."""
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
        """Each family is that of one moment since the page began."""
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
    """However many pages are in the making, and whichever of them is never finished."""
    for module, names in SHORT.items():
        for name in names:
            monkeypatch.setattr(f"sidestep.{module}.{name}", 2)
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
