"""The scheduler tap in a real vLLM's core: the exporter's page equals the engine's own."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import pytest

from exporters import until
from real_engines.comparison import (
    Page,
    assert_complete,
    assert_nothing_refused,
    count,
    engine_families,
    idle,
    labels_of,
    parse,
    report,
    settled,
    settled_alone,
    total,
    value,
)
from real_engines.load import MAIN_ENVIRON, MAIN_FLAGS, Answer, Ask, Client, generated, reasons
from real_engines.processes import ExporterProcess, Server, at_start
from real_engines.sites import (
    BLOCK_LIFETIMES,
    BLOCKS,
    IDLE_ADAPTERS,
    TAP,
    VllmSite,
    without_streams,
)
from sidestep.engines.vllm.own_rows import STATES

pytestmark = pytest.mark.engine

NO_PLUGIN = {"VLLM_PLUGINS": "none"}
GENERATED = "vllm:generation_tokens"
LONG = 1900
"""Tokens with which a request outlives one exporter and reaches the next."""
TTFT = "vllm:time_to_first_token_seconds"
E2E = "vllm:e2e_request_latency_seconds"
HOPS = "sidestep_frontend_hop_seconds"
STARTUP = "sidestep_startup_seconds"
HOP = 0.1
"""Seconds, on average, that an output may take from the core to the front end on two cores."""


@pytest.mark.parametrize("scheduling", ["--async-scheduling", "--no-async-scheduling"])
async def test_intervals_agree_with_the_engines(scheduling: str, vllm: VllmSite) -> None:
    """Every family of the page: TTFT and e2e from the front end, all others from the core's events."""
    server = vllm.server([*MAIN_FLAGS, *TAP, scheduling], MAIN_ENVIRON)
    async with vllm.with_exporter(server) as exporter:
        async with Client(server.base) as client:
            answers = await client.mixed(leave=False, stop_strings=False)
        theirs, ours, found = await settled(server, exporter)
        hop = total(ours, HOPS) / max(count(ours, HOPS), 1)
        report(f"tap {scheduling}", ours, answers, hop=hop)

    assert [] == found
    assert [400] == [answer.status for answer in answers if answer.status != 200]
    assert_nothing_refused(ours)
    assert value(theirs, "vllm:num_preemptions") > 0
    core, whole = (value(ours, STARTUP, phase=phase) for phase in ("core", "front_end"))
    assert 0 < core < whole
    assert 0 < count(ours, HOPS) <= count(ours, TTFT)
    assert 0 < hop < HOP


async def test_without_statistics_in_the_front_end(vllm: VllmSite) -> None:
    """The front end counts nothing, clients leave and stop strings end: all of it is on the page."""
    # At its default of 0 vLLM kills its core at once: the stream would not be closed.
    # The executor starts a worker process even for one device.
    more = [
        "--disable-log-stats",
        "--shutdown-timeout",
        "30",
        "--distributed-executor-backend",
        "mp",
    ]
    flags = [*MAIN_FLAGS, *TAP, *more]
    server = vllm.server(flags, {**MAIN_ENVIRON, **NO_PLUGIN})
    async with vllm.with_exporter(server) as exporter:
        async with Client(server.base) as client:
            answers = await client.mixed()
        theirs = parse(await server.page())
        left = sum(answer.left for answer in answers)
        ended = reasons(answers)

        def all_in(page: Page) -> bool:
            counted = value(page, "vllm:request_success")
            running = value(page, "vllm:num_requests_running")
            return counted >= left + ended.total() and not running

        ours = await settled_alone(exporter, all_in)
        report("core alone", ours, answers)
        await server.stop()
        after = await without_streams(exporter)

    assert not [name for name in engine_families(theirs) if name.startswith("vllm:num_")]
    assert {**ended, "abort": left} == {
        reason: value(ours, "vllm:request_success", finished_reason=reason)
        for reason in (*ended, "abort")
    }
    assert left == 5
    for family in ("prompt_tokens", "generation_tokens", "duration_seconds"):
        assert left == count(ours, f"sidestep_aborted_request_{family}")
    for family in ("queue_time", "prefill_time", "decode_time", "inference_time"):
        assert ended.total() == count(ours, f"vllm:request_{family}_seconds")
    assert value(ours, GENERATED) >= generated(answers)
    finished = [answer for answer in answers if answer.reasons]
    assert len(finished) == count(ours, "vllm:request_params_n")
    assert ended.total() == total(ours, "vllm:request_params_n")
    preemptions = value(ours, "vllm:num_preemptions")
    assert preemptions > 0
    assert preemptions >= count(ours, "sidestep_request_preempted_seconds") > 0
    steps = count(ours, "sidestep_iteration_duration_seconds")
    assert steps >= count(ours, "vllm:iteration_tokens_total") > 0
    assert steps == count(ours, "sidestep_iteration_interval_seconds") + 1
    assert total(ours, "sidestep_iteration_prefill_tokens") >= total(
        ours, "vllm:request_prefill_kv_computed_tokens"
    )
    assert {0.0} == {value(ours, "sidestep_requests", state=state) for state in STATES}
    assert len(labels_of(ours, "sidestep_requests")) == len(STATES)
    for process in ("core", "worker0"):
        assert value(ours, "sidestep_engine_process_cpu_seconds", process=process) > 0
        assert (
            value(ours, "sidestep_engine_process_resident_memory_bytes", process=process) > 1 << 28
        )
    (python,) = labels_of(theirs, "python_info")
    (core,) = labels_of(ours, "sidestep_engine_process_python_info")
    assert python.items() <= core.items()
    assert value(after, "sidestep_engine_up") == 0
    assert_nothing_refused(ours)


async def test_waiting_adapters_are_distinct_from_running_ones(
    vllm: VllmSite, adapters: dict[str, Path]
) -> None:
    """With one adapter allowed, the other waits and is exposed so, though it never had output."""
    flags = shlex.split("--enable-lora --max-loras 1 --max-lora-rank 8 --max-num-seqs 4")
    modules = [f"{name}={path}" for name, path in adapters.items()]
    server = vllm.server([*flags, *TAP, "--lora-modules", *modules])
    combinations: set[tuple[str, str]] = set()
    async with vllm.with_exporter(server) as exporter:

        async def one_waits() -> bool:
            page = parse(await exporter.page())
            for labels in labels_of(page, "vllm:lora_requests_info"):
                combinations.add((labels["running_lora_adapters"], labels["waiting_lora_adapters"]))
            return any(
                set(waiting.split(",")) - set(running.split(",")) & adapters.keys()
                for running, waiting in combinations
                if running and waiting
            )

        async with Client(server.base) as client:
            asks = [Ask(client.text(40), 300, model=name) for name in list(adapters) * 8]
            what = "an adapter that waits while the other runs"
            watching = asyncio.create_task(until(one_waits, 60, what))
            answers: list[Answer] = []
            # An engine that has all cores may finish them before the exporter is scheduled.
            while not watching.done():
                answers += await client.ask_all(asks)
            await watching
        theirs, ours, found = await settled(
            server, exporter, apart=["vllm:lora_requests_info", *BLOCKS]
        )
        report("lora", theirs, answers)

    assert [] == found
    # --max-loras 1: two adapters never run together.
    assert {running for running, _ in combinations} <= {"", *adapters}
    assert [IDLE_ADAPTERS] == labels_of(ours, "vllm:lora_requests_info")
    assert IDLE_ADAPTERS in labels_of(theirs, "vllm:lora_requests_info")
    assert [] == labels_of(ours, "sidestep_lora_requests")
    assert_nothing_refused(ours)


async def killed_exporter(vllm: VllmSite, server: Server) -> tuple[list[Answer], Page] | None:
    """Return long completions and the page of an exporter that replaced a killed one meanwhile.

    Returns:
        None if the completions ended before the second exporter started.
    """
    async with vllm.exporter() as first, Client(server.base) as client:
        await first.started()
        asks = [Ask(client.text(20), LONG) for _ in range(24)]
        asking = asyncio.create_task(client.ask_all(asks))

        def have_begun(page: Page) -> bool:
            # Either stream, the front end's or the core's, may be connected later.
            begun = count(page, "vllm:time_to_first_token_seconds"), value(page, GENERATED)
            return min(begun) >= len(asks)

        await settled_alone(first, have_begun)
        # Until all events of the completions' start have arrived.
        await asyncio.sleep(1.0)
        first.kill()
        async with vllm.exporter() as second:
            await second.started()
            is_late = asking.done()
            answers = await asking
            if is_late:
                return None

            def all_ended(page: Page) -> bool:
                # The front end's stream may be later than the core's.
                ended = value(page, "vllm:request_success"), count(page, E2E)
                return ended == (len(asks), len(asks))

            return answers, await settled_alone(second, all_ended)


async def test_an_exporter_that_starts_in_the_middle(vllm: VllmSite) -> None:
    """No request fails, tokens count, and intervals that began before are left out, but for the front end's own."""
    server = vllm.server(TAP)
    async with server:
        await server.started()
        # On a machine of two cores requests may be over before the second exporter is scheduled.
        for _ in range(5):
            found = await killed_exporter(vllm, server)
            if found is not None:
                break

    assert found is not None
    answers, ours = found
    asked = len(answers)
    assert_complete(answers)
    assert asked == value(ours, "vllm:request_success", finished_reason="length")
    assert asked == value(ours, "sidestep_untracked_requests", reason="unknown")
    assert asked == count(ours, "vllm:request_prompt_tokens")
    assert asked == count(ours, E2E)
    assert 0 == count(ours, "vllm:request_queue_time_seconds")
    assert 0 == count(ours, "vllm:request_decode_time_seconds")
    assert LONG * asked == total(ours, "vllm:request_generation_tokens")
    latencies = count(ours, "vllm:inter_token_latency_seconds")
    assert 0 < latencies < LONG * asked
    assert value(ours, GENERATED) == latencies + asked
    assert_nothing_refused(ours)


TWO_COLLECTORS = """
import copy

from sidestep_adapters.vllm.kv_cache import BlockTap
from sidestep_adapters.vllm.scheduler import SidestepScheduler


class Pair:
    def __init__(self, native, ours):
        self.both = native, ours
        self.drain_events = native.drain_events

    def __getattr__(self, name):
        def call(*args):
            for collector in self.both:
                getattr(collector, name)(*args)
        return call


class Both(SidestepScheduler):
    def __new__(cls, *args, **kwargs):
        scheduler = SidestepScheduler(*args, **kwargs)
        core, pool = scheduler._core, scheduler.kv_cache_manager.block_pool
        core._blocks = BlockTap(core.publisher.push)
        pool.metrics_collector = Pair(pool.metrics_collector, core._blocks)
        record = core.record

        def without_evictions(stats):
            ours = copy.copy(stats)
            ours.kv_cache_eviction_events = []
            record(ours)

        core.record = without_evictions
        return scheduler
"""
"""A scheduler whose block pool feeds vLLM's collector and ours; vLLM's goes to its own page only."""


async def is_up(exporter: ExporterProcess) -> bool:
    """Return whether the engine's streams are open."""
    return value(parse(await exporter.page()), "sidestep_engine_up") == 1


async def test_block_lifetimes_agree_with_the_engines_collector(vllm: VllmSite) -> None:
    """Lifetimes of sampled blocks equal those of vLLM's own collector."""
    folder = Path(at_start(vllm.home, ""))
    (folder / "collectors.py").write_text(TWO_COLLECTORS)
    flags = [*MAIN_FLAGS, "--scheduler-cls", "collectors.Both"]
    server = vllm.server(flags, {**NO_PLUGIN, "PYTHONPATH": str(folder)})
    async with vllm.with_exporter(server, "--kv.sample-rate", "1") as exporter:
        async with Client(server.base) as client:
            # Blocks are sampled once the core has received the exporter's rate, after its Hello's answer.
            await until(lambda: is_up(exporter), 30, "the core's stream")
            await asyncio.sleep(1.5)
            answers = await client.mixed(leave=False)
            pages: list[Page] = []

            async def agree() -> bool:
                pages[:] = [parse(await server.page()), parse(await exporter.page())]
                return (
                    all(map(idle, pages)) and len({value(page, GENERATED) for page in pages}) == 1
                )

            # An idle engine's last steps may be on their way yet, to either page.
            await until(agree, 30, "the last steps on both pages")
            theirs, ours = pages
        report("blocks", ours, answers, theirs=count(theirs, BLOCK_LIFETIMES))

    *lifetimes, gaps = BLOCKS
    for name in lifetimes:
        assert count(ours, name) == count(theirs, name) > 300
        # Each collector reads the clock for itself, some microseconds apart.
        assert total(ours, name) == pytest.approx(total(theirs, name), rel=1e-3)
    assert count(ours, gaps) == count(theirs, gaps) > 0
    assert total(ours, gaps) == pytest.approx(total(theirs, gaps), abs=1e-3)
    assert count(ours, "sidestep_kv_block_reuse_gap_seconds") >= count(ours, gaps)
    assert count(ours, "sidestep_kv_block_reuses") == count(ours, BLOCK_LIFETIMES)
    assert_nothing_refused(ours)


BROKEN_TAP = """
import itertools
import sidestep_adapters.vllm.kv_cache as blocks
import sidestep_adapters.vllm.scheduler_events as events
import sidestep_adapters.vllm.scheduler_tap as tap

turns = itertools.count()

def broken(*_):
    raise RuntimeError("broken on purpose")

scheduled = tap.SchedulerTap.scheduled
tap.SchedulerTap.scheduled = lambda *a: broken() if next(turns) % 5 == 4 else scheduled(*a)
events.Prompt = broken
blocks.BlockEvents = broken
"""
"""Start-up code: every fifth batch fails on the step's thread, prompts in the publisher thread, block
events at each flush.
"""


async def test_a_broken_tap_costs_the_engine_nothing(vllm: VllmSite) -> None:
    """Every request is served; events that could not be sent are counted, the others arrive."""
    server = vllm.server(TAP, {"PYTHONPATH": at_start(vllm.home, BROKEN_TAP)})
    async with vllm.with_exporter(server, "--kv.sample-rate", "1") as exporter:
        async with Client(server.base) as client:
            answers = await client.ask_all([Ask(client.text(20), 50) for _ in range(20)])

        def complained(page: Page) -> bool:
            ended = value(page, "vllm:request_success")
            return value(page, "sidestep_stream_errors") > 10 and ended >= len(answers)

        ours = await settled_alone(exporter, complained)
        report("broken tap", ours, answers)

    assert_complete(answers)
    assert value(ours, "sidestep_stream_errors") > 10
    assert value(ours, "vllm:request_success") == 20


@pytest.mark.parametrize("processes", ["0", "1"], ids=["one process", "a core's process"])
async def test_the_synchronous_class_is_counted_without_a_stat_logger(
    processes: str, vllm: VllmSite
) -> None:
    """Only the scheduler is tapped; at the program's end all items and a goodbye have arrived."""
    script = Path(__file__).with_name("llm_program.py")
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": processes}
    async with vllm.exporter() as exporter:
        await exporter.started()
        code, output = await vllm.run_program(script, environ=environ)
        ours = await without_streams(exporter)
        report("synchronous", ours, [])

    assert code == 0, output[-4000:]
    assert "240" in output.split()
    assert value(ours, GENERATED) == 240
    assert value(ours, "vllm:request_success", finished_reason="length") == 12
    assert (6, 12.0) == (
        count(ours, "vllm:request_params_n"),
        total(ours, "vllm:request_params_n"),
    )
    assert value(ours, "sidestep_engine_up") == 0
    # Without a goodbye the stream would count until its silence expires the gauges, too.
    assert labels_of(ours, "vllm:num_requests_running")
    assert_nothing_refused(ours)
