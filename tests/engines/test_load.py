"""The saturation ratio: its inputs from engines' series, and the pages that expose it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from exporters import Start, until
from pages import get, parse
from peers import count, publisher
from ramped import AHEAD, SHORT, SMALL, overload, play
from ramps import Simulation
from sglang_bench import SCHEDULER, family, stats
from sglang_bench import Bench as SglangBench
from sidestep.engines.sglang.wire import QueueCount
from sidestep.engines.vllm.wire import SchedulerStats
from sidestep.metrics.exposed_engines import GAUGES_EXPIRE_SECONDS
from sidestep.metrics.load_inputs import LoadTracker
from sidestep.metrics.saturation import Saturation
from sidestep.protocol.messages import LIMITS
from sidestep.protocol.self_described import Sample
from vllm_bench import Bench, step, tokens

NAME = "sidestep_saturation_ratio"


async def ratio(url: str) -> list[float]:
    """Return the samples of the page."""
    page = parse(await get(url))
    return [*page[NAME].samples.values()] if NAME in page else []


async def test_every_page_has_the_ratio_of_overloaded_engines(start: Start) -> None:
    """The pod view has the highest."""
    async with start() as exporter:
        await overload(exporter)
        (first,) = await ratio(exporter.url)
        await play(exporter, Simulation(SMALL, SHORT, lambda _: 8.0, 1).looks(650, 5.0), "other")
        both = await ratio(exporter.url)
        pod = await ratio(exporter.url.replace("/metrics", "/metrics/pod"))

    assert 1.3 < first < 1.8
    assert len(both) == 2
    assert first in both
    assert pod == [max(both)] != [first]


async def test_a_new_exporter_has_no_ratio(start: Start, tmp_path: Path) -> None:
    """Even with the counters of a snapshot: no series is better than a wrong one."""
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
    """Return the ratio after ``seconds`` with 4 requests in the batch, 2 that begin and a step a second."""
    loads = LoadTracker(bench.registry)
    for second in range(seconds):
        scheduler = SchedulerStats(num_running_reqs=4, num_waiting_reqs=waiting)
        iteration = tokens(100)
        iteration.time_to_first_tokens_iter = [0.1] * 2
        bench.apply(step(scheduler, iteration, stamp=second + 1.0))
        loads.update(float(second))
    found = bench.engines["0"].find_part(Saturation)
    return None if found is None else found.ratio


@pytest.fixture
def fed() -> Bench:
    """Return a registry with one engine that a stream feeds."""
    bench = Bench()
    bench.engine().feeds.streams.add(1)
    return bench


@pytest.mark.parametrize(("most", "ratio"), [("200", 0.625), ("50", 1.0), ("", 0.25)])
def test_steps_that_compute_all_that_they_may_are_load(fed: Bench, most: str, ratio: float) -> None:
    """The engine's Hello has the most tokens of a step; each of these generates 100."""
    limits = {"max_running_requests": "16", "max_step_tokens": most}
    fed.engine(info={LIMITS: limits}).feeds.streams.add(1)

    assert looked(fed, seconds=200, waiting=0) == ratio


@pytest.mark.parametrize("most", ["-1", "many", "9" * 30])
def test_slots_that_are_no_number_are_unknown(fed: Bench, most: str) -> None:
    """Then only a queue and the KV cache say how full the batch is."""
    fed.engine(info={LIMITS: {"max_running_requests": most}}).feeds.streams.add(1)

    assert looked(fed, seconds=200, waiting=0) == 0.0
    assert fed.values("sidestep_max_running_requests") == {}


def test_kv_blocks_in_use_fill_the_batch(fed: Bench) -> None:
    """Cached blocks that no request uses do not count as used in the engine's own gauge."""
    fed.engine(info={LIMITS: {"max_running_requests": "16"}}).feeds.streams.add(1)
    loads = LoadTracker(fed.registry)
    for second in range(200):
        scheduler = SchedulerStats(num_running_reqs=4, kv_cache_usage=0.75)
        fed.apply(step(scheduler, tokens(100), stamp=second + 1.0))
        loads.update(float(second))

    assert fed.value(NAME) == 0.75


def test_the_shortest_step_has_its_time(fed: Bench) -> None:
    """The time says how old it is."""
    engine = fed.engines["0"]
    loads = LoadTracker(fed.registry)
    for second in range(100):
        # 20 steps per second at first, 10 later.
        for part in range(20 if second < 50 else 10):
            stamp = second + part / (20 if second < 50 else 10)
            fed.apply(step(SchedulerStats(num_running_reqs=4), tokens(4), stamp=stamp))
        engine.last_seen = 1e9 + second
        loads.update(float(second))

    assert fed.value("sidestep_shortest_step_seconds") == pytest.approx(0.05, rel=0.1)
    assert 1e9 < fed.value("sidestep_shortest_step_timestamp_seconds") <= 1e9 + 50


def test_a_silent_engine_is_not_tracked(fed: Bench) -> None:
    """Without a stream nothing is learned; when gauges expire, the estimate is deleted."""
    looked(fed, seconds=500)
    engine = fed.engines["0"]
    engine.feeds.streams.clear()
    loads = LoadTracker(fed.registry)
    loads.update(600.0)
    assert engine.part(Saturation).ratio is not None

    fed.registry.expire(engine.feeds.seen_at + GAUGES_EXPIRE_SECONDS)
    loads.update(700.0)
    assert not engine.live
    assert engine.find_part(Saturation) is None


def test_the_estimate_of_a_restarted_engine_starts_anew(fed: Bench) -> None:
    """Its gauges are unknown until its first report."""
    looked(fed, seconds=500)
    engine = fed.engines["0"]
    engine.feeds.streams.clear()
    fed.registry.reset_gauges(engine)
    engine.feeds.streams.add(2)
    LoadTracker(fed.registry).update(600.0)

    assert engine.find_part(Saturation) is None
    assert fed.values(NAME) == {}


def sglang_tick(second: int, waiting: int) -> tuple[Any, ...]:
    """Apply one second of a scheduler with half of its slots taken: 2 requests begin, in 10 steps."""
    return (
        stats(
            second + 1.0,
            num_running_reqs=QueueCount(4),
            num_queue_reqs=QueueCount(waiting),
            max_running_requests=8,
        ),
        family("sglang:queue_time_seconds", "histogram", [], Sample(observations=[0.5, 0.5])),
        family(
            "sglang:cuda_graph_passes_total",
            "counter",
            ["mode"],
            Sample(["decode_cuda_graph"], 9),
            Sample(["prefill_none"], 1),
        ),
    )


@pytest.mark.parametrize(("waiting", "wanted"), [(3, 1.0), (0, 0.5)])
def test_sglangs_schedulers_have_a_ratio(waiting: int, wanted: float) -> None:
    """The inputs come from other series."""
    bench = SglangBench(SCHEDULER)
    engine = bench.registry.engines["s"]
    engine.feeds.streams.add(1)
    loads = LoadTracker(bench.registry)
    for second in range(500):
        bench.apply(*sglang_tick(second, waiting))
        loads.update(float(second))

    assert engine.part(Saturation).ratio == pytest.approx(wanted, abs=0.01)
    assert engine.part(Saturation).shortest.seconds == pytest.approx(0.1)
    page = parse(bench.text)
    assert [*page[NAME].samples.values()] == [engine.part(Saturation).ratio]
    assert [*page["sidestep_max_running_requests"].samples.values()] == [8]
