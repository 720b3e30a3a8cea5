"""The statistics line: its numbers, its level, and which engines have one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec
import pytest

from exporters import Start, until
from intakes import Fed, steps
from polled import page, polled
from sglang_bench import SCHEDULER, family, stats
from sglang_bench import Bench as SglangBench
from sidestep.engines.items import encode_item
from sidestep.engines.sglang.wire import QueueCount
from sidestep.engines.vllm.wire import CacheStats, SchedulerStats, SpecDecodingStats, VllmStep
from sidestep.exposition.live.answers import EngineRow
from sidestep.exposition.statistics_log import Line, StatsLog
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.protocol.iteration_stats import IterationStats, PromptTokenStats
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import EngineInfo, Heartbeat, Hello
from sidestep.protocol.request_events import (
    LIMITS,
    Event,
    Finished,
    Iteration,
    Queued,
    RequestEvents,
)
from sidestep.protocol.self_described import Sample
from sidestep.tracking.health.states import Health
from sidestep_adapters.streams.wire import ForwardPass, Pass, QueuedRequests, ScheduledRequests
from trtllm_page import made_page
from vllm_bench import Bench


class Log:
    """A log of a registry's engines; ten seconds pass from line to line."""

    def __init__(
        self,
        registry: Registry,
        health: Callable[[Engine], Health | None] = lambda _: None,
        pages: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.now = 5.0
        self.registry = registry
        self.log = StatsLog(registry, health, lambda: self.now, lambda: 1e9 + self.now, pages)

    def lines(self) -> list[tuple[int, Line]]:
        """Return the lines of the last ten seconds, in which streams have fed all engines."""
        self.now += 10.0
        for engine in self.registry:
            engine.feeds.streams.add(1)
        return [*self.log.lines()]

    def texts(self) -> list[str]:
        """Return their texts."""
        return [line.text() for _, line in self.lines()]


def busy(running: int = 2, usage: float = 0.25) -> VllmStep:
    """A step with a bit of everything."""
    scheduler = SchedulerStats(
        num_running_reqs=running,
        num_waiting_reqs=1,
        num_skipped_waiting_reqs=3,
        kv_cache_usage=usage,
        prefix_cache_stats=CacheStats(requests=1, queries=100, hits=40),
        spec_decoding_stats=SpecDecodingStats(2, 5, 10, 4, [3, 1], [5, 5]),
    )
    prompt = PromptTokenStats(computed=60, local_cache_hit=40, total=100)
    iteration = IterationStats(
        num_generation_tokens=20, prompt_token_stats=prompt, num_preempted_reqs=1
    )
    return VllmStep(0, 1.0, 1.0, scheduler, iteration)


@pytest.fixture
def bench() -> Bench:
    """One engine."""
    made = Bench()
    made.engine()
    return made


def test_the_line_covers_the_interval(bench: Bench) -> None:
    """Throughputs per second of computed and generated tokens, states as they are."""
    log = Log(bench.registry)
    bench.apply(busy())
    ((level, line),) = log.lines()

    assert level == logging.INFO
    assert line.text() == (
        "engine 0, model m: prompt 6.0 tokens/s, generation 2.0 tokens/s, running 2, waiting 4,"
        " deferred 3, preemptions 1, KV cache 25.0%, prefix cache hits 40.0%,"
        " drafts accepted 40.0%"
    )


def test_the_line_ends_with_the_limit_that_binds(bench: Bench) -> None:
    """By its share of the interval's busy time, not of all time; a limit that holds briefly has no place."""
    bench.apply(busy())
    log = Log(bench.registry)

    def run(*limits: str) -> str:
        start = log.now
        events: list[Event] = [Queued(1, start), *(
            Iteration(start + at, start + at + 0.5, start, limit=LIMITS.index(limit))
            for at, limit in enumerate(limits)
        )]  # fmt: skip
        bench.apply(
            RequestEvents(0, start, 1, [*events, Finished(1, start + len(limits) - 0.5, 0.0, 0)])
        )
        (line,) = log.lines()
        return line[1].text().rpartition(", ")[2]

    assert "limit kv_blocks 67%" == run("slots", "slots", *["kv_blocks"] * 6, "none", "none")
    assert "limit slots 32%" == run(*["slots"] * 3, *["none"] * 7)
    assert "limit" not in run(*["none"] * 10)
    assert "limit" not in run("slots", *["none"] * 14)
    bench.apply(busy())
    (line,) = log.lines()
    assert "limit" not in line[1].text(), "none held in an interval without steps that have one"


@pytest.mark.parametrize("count", [1, 2])
def test_hit_rates_are_of_the_last_thousand_lookups(count: int) -> None:
    """As in the engine's own log, whichever cache: an interval alone may have one lookup or none."""
    bench = Bench()
    for number in range(count):
        bench.engine(str(number))
    log = Log(bench.registry)

    def look_up(requests: int, hits: int) -> str:
        lookups = CacheStats(requests=requests, queries=100 * requests, hits=hits)
        stats = SchedulerStats(prefix_cache_stats=lookups, connector_prefix_cache_stats=lookups)
        for number in range(count):
            bench.apply(VllmStep(0, 1.0, 1.0, stats, mm_cache=lookups), to=str(number))
        return log.texts()[-1]

    caches = "prefix cache hits", "external prefix cache hits", "multimodal cache hits"
    expected = [(9, 900, "100.0%"), (1, 0, "90.0%"), (0, 0, "90.0%"), (990, 0, "0.9%")]
    for requests, hits, rate in (*expected, (1000, 50_000, "50.0%")):
        line = look_up(requests, hits)
        assert [f", {cache} {rate}" in line for cache in caches] == [True] * 3, line


def test_the_lowest_rank_of_an_sglang_replica_has_a_line() -> None:
    """Further ranks repeat what it reports, and tokenizers have no requests in a batch."""
    ranks = [("s", "0", "0"), ("s1", "0", "1"), ("s2", "1", "2")]
    infos = [
        EngineInfo(name, "sglang", {**SCHEDULER.labels, "dp_rank": replica, "tp_rank": rank})
        for name, replica, rank in ranks
    ]
    tokenizer = {name: SCHEDULER.labels[name] for name in ("engine_type", "model_name")}
    bench = SglangBench(*reversed(infos), EngineInfo("t", "sglang", tokenizer))
    state = stats(
        num_running_reqs=QueueCount(3, {"1": 1, "2": 2}),
        num_queue_reqs=QueueCount(1),
        token_usage=0.5,
    )
    modes = {"prefill_compute": 50.0, "prefill_cache": 9.0, "decode": 20.0}
    samples = [Sample([mode], count) for mode, count in modes.items()]
    generated = family("sglang:realtime_tokens_total", "counter", ["mode"], *samples)
    retracted = family("sglang:num_retracted_requests_total", "counter", [], Sample([], 2.0))
    log = Log(bench.registry)
    for name, _, _ in ranks:
        bench.apply(state, generated, retracted, to=name)
    lines = log.texts()

    assert lines[1] == (
        f"engine s, model {SCHEDULER.labels['model_name']}: prompt 5.0 tokens/s, generation 2.0 tokens/s, running 3, waiting 1,"
        " preemptions 2, KV cache 50.0%"
    )
    names = [line.partition(":")[0].partition(",")[0] for line in lines]
    assert names == ["engine s2", "engine s", "2 engines"]


def test_engines_of_all_dialects_are_added_up_but_for_streams() -> None:
    """The engine that publishes a stream usually pushes its own statistics."""
    bench = Bench()
    bench.engine()
    bench.engine("s", dialect="sglang", labels=SCHEDULER.labels)
    bench.engine("f", dialect="stream", id="stream/m/0", features=["forward_pass"])
    bench.engine("l", dialect="stream", features=["load"])
    log = Log(bench.registry)
    bench.apply(busy(running=2, usage=0.2))
    bench.apply(stats(num_running_reqs=QueueCount(3), token_usage=0.4), to="s")
    ran = ScheduledRequests(sum_prefill_tokens=70, num_decode_requests=5)
    bench.apply(ForwardPass(0, 1.0, ran, QueuedRequests(4), Pass(ran)), to="f")
    _, _, stream, (_, total) = log.lines()

    assert stream[1].text() == (
        "engine stream/m/0, model m: prompt 7.0 tokens/s, generation 0.5 tokens/s, running 5,"
        " waiting 4"
    )
    assert total.text().startswith(
        "2 engines: prompt 6.0 tokens/s, generation 2.0 tokens/s, running 5"
    )
    assert total.row.kv_cache_usage == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("core", ("vllm", "prompt ", "generation ", "running ", "TTFT ", "ITL ")),
        ("sglang", ("sglang", "TTFT ", "ITL ")),
        ("sglang", ("sglang", "prompt ", "generation ", "running ")),
        ("triton", ("triton", "finished ")),
    ],
)
def test_engines_of_every_dialect_have_a_line(run: str, expected: tuple[str, ...]) -> None:
    """With the latencies, from the process of the engine that knows them."""
    fed = Fed()
    log = Log(fed.intake.registry)
    fed.feed(steps(run))
    found = log.lines()
    dialect, *parts = expected

    assert [
        line
        for _, line in found
        if line.row.dialect == dialect
        and all(part in line.text() for part in parts)
        and line.text().startswith(f"engine {line.row.id}")
    ]


def test_a_line_has_the_names_of_the_api() -> None:
    """And only what is known."""
    fed = Fed()
    log = Log(fed.intake.registry)
    fed.feed(steps("core"))
    (_, line), *_ = log.lines()
    fields = line.fields()
    names = {field.name for field in msgspec.structs.fields(EngineRow)}
    ttft = fields["ttft"]

    assert fields.keys() - names == {"event", "state_level"}
    assert not fields.keys() & {"time", "level", "logger", "msg"}
    assert None not in fields.values()
    assert {"id", "engine", "model", "generation_tokens_per_second"} < fields.keys()
    assert 0 < ttft["p50"] <= ttft["p95"] <= ttft["p99"]
    assert line.row.ttft is not None
    assert f"TTFT {1000 * line.row.ttft.p50:.3g} ms (p95 " in line.text()


def test_a_backlog_is_in_no_line() -> None:
    """An engine has counted while the exporter was away; the next line is as usual."""
    fed = Fed()
    log = Log(fed.intake.registry)
    infos = [EngineInfo("0", "vllm", {"engine": "0", "model_name": "m"})]
    fed.send("s", Hello(VERSION, "s", fed.incarnation("s"), 1, 1, infos))
    fed.seqs["s"] = 0
    for _ in range(100):
        fed.items("s", [encode_item(busy())] * 10)
    fed.now = 6.0
    fed.send("s", Heartbeat(fed.incarnation("s"), 1000, 0))
    ((_, line),) = log.lines()
    assert (line.row.generation_tokens_per_second, line.row.preemptions) == (None, None)
    assert "tokens/s" not in line.text()
    fed.items("s", [encode_item(busy())])
    ((_, line),) = log.lines()
    assert line.row.generation_tokens_per_second == 2.0


async def test_a_scraped_page_has_lines(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """A target has lines as long as it answers."""
    caplog.set_level(logging.INFO)
    async with (
        polled(page(made_page())) as server,
        start(scrape=(f"{server.url},interval=0.05",), log_stats_interval="0.1"),
    ):
        await until(lambda: f"page {server.url}, model Qwen3-8B: running 66" in caplog.text)
        await server.stop()
        await until(lambda: "unreachable" in caplog.text)
        caplog.clear()
        await server.start()
        await until(lambda: "page " in caplog.text)

    assert "running 66, waiting 17, KV cache 90.1%" in caplog.text
