"""What the exporter reads of engines' load, and what pages show of it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conftest import Start, until
from pages import get, parse
from peers import count, publisher
from ramped import AHEAD, SMALL, overload, play
from ramps import Simulation
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.sglang.wire import QueueCount
from sidestep.engines.vllm.wire import SchedulerStats
from sidestep.metrics.load_inputs import BATCH, INTERVAL, LoadTracker
from sidestep.metrics.registry import GAUGES_EXPIRE_SECONDS, Registry
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Sample
from test_apply import Bench, step, tokens
from test_sglang_items import SCHEDULER, family, stats
from test_sglang_items import Bench as SglangBench

NAME = "sidestep_saturation_ratio"


async def ratio(url: str) -> list[float]:
    """On the page."""
    page = parse(await get(url))
    return [*page[NAME].samples.values()] if NAME in page else []


async def test_overloaded_engines_are_seen_on_every_page(start: Start) -> None:
    """Pushed over a real socket; the pod's view has the highest."""
    async with start() as exporter:
        await overload(exporter)
        (first,) = await ratio(exporter.url)
        await play(exporter, Simulation(SMALL, lambda _: 8.0, 1).looks(650, 5.0), "other")
        both = await ratio(exporter.url)
        pod = await ratio(exporter.url.replace("/metrics", "/metrics/pod"))

    assert 1.3 < first < 1.8
    assert len(both) == 2
    assert first in both
    assert pod == [max(both)] != [first]


async def test_another_exporter_is_told_the_ratio(start: Start, tmp_path: Path) -> None:
    """Who counts computes it, and whoever is told of the engine shows the same."""
    path = f"ipc://{tmp_path}/root/i.ipc"
    leaf_flags = {"forward": path, "forward_interval": "0.05", "web_listen_address": ("",)}
    async with start(ingest_endpoint=(path,)) as root, start(**leaf_flags) as leaf:
        await overload(leaf)
        (engine,) = leaf.registry.engines.values()
        assert engine.saturation is not None
        wanted = engine.saturation.ratio
        await until(lambda: any(e.computed for e in root.registry.engines.values()))
        await until(
            lambda: (
                [e.computed.get("saturation") for e in root.registry.engines.values()] == [wanted]
            )
        )
        (shown,) = await ratio(root.url)

    assert shown == wanted


async def test_a_process_that_is_new_knows_nothing(start: Start, tmp_path: Path) -> None:
    """Not even with the counters of the one before: no series is better than a wrong one."""
    async with start(state_dir=str(tmp_path / "state")) as exporter:
        await overload(exporter)
        assert await ratio(exporter.url)
    async with start(state_dir=str(tmp_path / "state")) as exporter:
        with closing(publisher(exporter.endpoints[0], stream="ramped", engine="ramped")) as engine:
            engine.push(count(1))
            await until(lambda: exporter.intake.items > 0)
            exporter.intake.loads.update(AHEAD)
            assert await ratio(exporter.url) == []
            assert "ramped" in exporter.registry.engines


def looked(bench: Bench, *, seconds: int, waiting: int = 3) -> float | None:
    """The ratio of engine 0 after a full batch has made 100 tokens a second for that long."""
    loads = LoadTracker(bench.registry)
    for second in range(seconds):
        scheduler = SchedulerStats(num_running_reqs=4, num_waiting_reqs=waiting)
        iteration = tokens(100)
        iteration.time_to_first_tokens_iter = [0.1] * 2
        bench.apply(step(scheduler, iteration, stamp=second + 1.0))
        loads.update(float(second))
    found = bench.engines["0"].saturation
    return None if found is None else found.ratio


@pytest.fixture
def fed() -> Bench:
    """One engine with a stream."""
    bench = Bench()
    bench.engine().streams.add(1)
    return bench


def test_a_full_engine_whose_queue_stays_is_asked_for_what_it_can(fed: Bench) -> None:
    """As much comes as goes."""
    assert looked(fed, seconds=500) == pytest.approx(1.0, abs=0.01)
    assert fed.value(NAME) == pytest.approx(1.0, abs=0.01)


def test_what_waits_for_an_adapter_does_not_say_that_the_batch_is_full(fed: Bench) -> None:
    """Deferred requests wait for something passing."""
    loads = LoadTracker(fed.registry)
    for second in range(500):
        scheduler = SchedulerStats(num_running_reqs=4, num_skipped_waiting_reqs=3)
        iteration = tokens(100)
        iteration.time_to_first_tokens_iter = [0.1] * 2
        fed.apply(step(scheduler, iteration, stamp=second + 1.0))
        loads.update(float(second))

    assert fed.values(NAME) == {}


def test_a_silent_engine_is_not_followed(fed: Bench) -> None:
    """While nobody feeds it nothing is learned; once its gauges are gone all is forgotten."""
    looked(fed, seconds=500)
    engine = fed.engines["0"]
    engine.streams.clear()
    loads = LoadTracker(fed.registry)
    loads.update(600.0)
    assert engine.saturation is not None
    assert engine.saturation.ratio is not None

    fed.registry.expire(engine.seen_at + GAUGES_EXPIRE_SECONDS)
    loads.update(700.0)
    assert not engine.live
    assert engine.saturation is None


def test_an_engine_that_has_other_processes_now_begins_anew(fed: Bench) -> None:
    """Its gauges are unknown until they tell."""
    looked(fed, seconds=500)
    engine = fed.engines["0"]
    engine.streams.clear()
    fed.registry.reset_gauges(engine)
    engine.streams.add(2)
    LoadTracker(fed.registry).update(600.0)

    assert engine.saturation is None
    assert fed.values(NAME) == {}


def test_pages_are_made_anew_only_where_the_ratio_changed(fed: Bench) -> None:
    """It falls while nothing comes, item or not; an idle engine costs no page."""
    looked(fed, seconds=500)
    loads, engine = LoadTracker(fed.registry), fed.engines["0"]
    first = engine.version
    for second in range(500, 3000):
        loads.update(float(second))
    before = engine.version
    assert before > first
    loads.update(3001.0)

    assert engine.version == before


def test_many_engines_are_looked_at_some_at_a_time() -> None:
    """Each about once a second, none twice, and never all at once."""
    bench = Bench()
    for number in range(3 * BATCH + 1):
        engine = bench.engine(str(number))
        engine.streams.add(number)
        bench.apply(step(SchedulerStats(), tokens(1)), to=str(number))
    loads, seen = LoadTracker(bench.registry), []
    for _ in range(6):
        loads.update(1.0)
        seen.append(sum(e.saturation is not None for e in bench.engines.values()))

    assert seen == [BATCH, 2 * BATCH, 3 * BATCH, *[3 * BATCH + 1] * 3]
    loads.update(1.0 + INTERVAL)


def test_what_another_exporter_counts_is_not_followed(fed: Bench) -> None:
    """That one does."""
    fed.engines["0"].federated = True
    looked(fed, seconds=200)

    assert fed.engines["0"].saturation is None


def test_triton_and_streams_are_not_followed() -> None:
    """They tell of no batch."""
    registry = Registry({name: compile_layout(dialect) for name, dialect in DIALECTS.items()}, {})
    for dialect in ("triton", "stream"):
        labels = dict.fromkeys(registry.layouts[dialect].required_labels, "x")
        registry.register(EngineInfo(dialect, dialect, labels)).streams.add(1)
    LoadTracker(registry).update(1.0)

    assert [engine.saturation for engine in registry.engines.values()] == [None, None]


def sglang_tick(second: int) -> tuple[Any, ...]:
    """A second of a scheduler whose batch is full: 2 requests begin, 100 tokens are made."""
    return (
        stats(
            second + 1.0,
            num_running_reqs=QueueCount(4),
            num_queue_reqs=QueueCount(3),
        ),
        family("sglang:queue_time_seconds", "histogram", [], Sample(observations=[0.5, 0.5])),
        family("sglang:realtime_tokens_total", "counter", ["mode"], Sample(["decode"], 100)),
    )


def test_sglang_tells_as_much() -> None:
    """Of its schedulers; the same ratio by other series."""
    bench = SglangBench(SCHEDULER)
    engine = bench.registry.engines["s"]
    engine.streams.add(1)
    loads = LoadTracker(bench.registry)
    for second in range(500):
        bench.apply(*sglang_tick(second))
        loads.update(float(second))

    assert engine.saturation is not None
    assert engine.saturation.ratio == pytest.approx(1.0, abs=0.01)
    assert [*parse(bench.text)[NAME].samples.values()] == [engine.saturation.ratio]
