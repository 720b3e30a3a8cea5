"""The statistics line, against the arithmetic of the engine's own."""

from __future__ import annotations

import logging

import pytest

from sidestep.engines.items import VllmStep
from sidestep.engines.vllm.wire import CacheStats, SchedulerStats, SpecDecodingStats
from sidestep.exposition.statistics_log import StatsLog
from sidestep.protocol.iteration_stats import IterationStats, PromptTokenStats
from vllm_bench import Bench


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
    log = StatsLog(bench.registry)
    bench.apply(busy())
    ((level, line),) = log.lines(10.0)

    assert level == logging.INFO
    assert line.text() == (
        "engine 0: prompt 6.0 tokens/s, generation 2.0 tokens/s, running 2, waiting 4,"
        " deferred 3, preemptions 1, KV cache 25.0%, prefix cache hits 40.0%,"
        " drafts accepted 40.0%"
    )


def test_idle_lines_are_for_debugging(bench: Bench) -> None:
    """The first idle interval after work is still told, as the engine does."""
    log = StatsLog(bench.registry)
    bench.apply(busy())
    levels = [log.lines(10.0)[0][0] for _ in range(3)]

    assert levels == [logging.INFO, logging.INFO, logging.DEBUG]


def test_several_engines_are_added_up(bench: Bench) -> None:
    """States are sums, the cache usage is a mean, hit rates weigh by lookups."""
    bench.engine("1")
    log = StatsLog(bench.registry)
    bench.apply(busy(running=2, usage=0.2))
    bench.apply(busy(running=3, usage=0.4), to="1")
    *_, (_, line) = log.lines(10.0)

    assert line.engines == 2
    assert line.running == 5
    assert line.kv_cache_usage == pytest.approx(0.3)
    assert line.generation_throughput == 4.0
    assert line.prefix_hit_rate == 0.4
    assert line.text().startswith("2 engines: ")


def test_the_line_leaves_throughput_for_the_old_gauges() -> None:
    """The names that once carried it show the last interval."""
    bench = Bench(legacy=True)
    bench.engine()
    bench.apply(busy())
    StatsLog(bench.registry).lines(10.0)

    assert bench.value("vllm:avg_prompt_throughput_toks_per_s") == 6.0
    assert bench.value("vllm:avg_generation_throughput_toks_per_s") == 2.0
