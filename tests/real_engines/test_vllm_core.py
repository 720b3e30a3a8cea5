"""The tap in a real vLLM's core against the engine's own page."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import pytest

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
from real_engines.processes import (
    ExporterProcess,
    Process,
    VllmServer,
    at_start,
    engine_environ,
    until,
)
from sidestep.engines.vllm.core_rows import STATES

pytestmark = pytest.mark.engine

TAP = ["--scheduler-cls", "sidestep_adapters.vllm.scheduler.SidestepScheduler"]
NO_PLUGIN = {"VLLM_PLUGINS": "none"}
ARRIVAL = ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds")
"""The engine's own end in the front end, after the output's hop from the core."""
TOKENS = "vllm:generation_tokens"
LIFETIME = "vllm:kv_block_lifetime_seconds"
BLOCKS = (
    LIFETIME,
    "vllm:kv_block_idle_before_evict_seconds",
    "vllm:kv_block_reuse_gap_seconds",
)
"""Not on the engine's page without --kv-cache-metrics; the tap samples by itself."""
LONG = 1900
"""Tokens: long enough for an exporter to be killed, started and greeted meanwhile."""
HOP = 0.1
"""Seconds, on average, that this hop may take on a machine of two cores."""


@pytest.mark.parametrize("scheduling", ["--async-scheduling", "--no-async-scheduling"])
async def test_intervals_agree_with_the_engines(
    scheduling: str, vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """Every family of the page, from the core's raw events alone; TTFT and e2e up to the hop."""
    environ = {**MAIN_ENVIRON, "SIDESTEP_ENDPOINT": endpoint}
    flags = [*MAIN_FLAGS, *TAP, scheduling]
    server = VllmServer(vllm_python, tiny, home, flags, environ)
    async with ExporterProcess(endpoint, home / "exporter.log") as exporter, server:
        await exporter.started()
        await server.started()
        async with Client(server.base) as client:
            answers = await client.mixed(leave=False, stop_strings=False)
        theirs, ours, found = await settled(server, exporter, apart=ARRIVAL)
        hops = {
            name: (total(theirs, name) - total(ours, name)) / count(theirs, name)
            for name in ARRIVAL
        }
        report(f"tap {scheduling}", ours, answers, hops=hops)

    assert [] == found
    assert [400] == [answer.status for answer in answers if answer.status != 200]
    assert_nothing_refused(ours)
    assert value(theirs, "vllm:num_preemptions") > 0
    for name, hop in hops.items():
        assert count(theirs, name) == count(ours, name)
        assert 0 <= hop < HOP, name


async def test_without_statistics_in_the_front_end(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """The front end counts nothing, clients leave and stop strings end: all of it is on the page."""
    environ = {**MAIN_ENVIRON, **NO_PLUGIN, "SIDESTEP_ENDPOINT": endpoint}
    # At its default of 0 vLLM kills its core at once: no goodbye can be said.
    flags = [*MAIN_FLAGS, *TAP, "--disable-log-stats", "--shutdown-timeout", "30"]
    server = VllmServer(vllm_python, tiny, home, flags, environ)
    async with ExporterProcess(endpoint, home / "exporter.log") as exporter, server:
        await exporter.started()
        await server.started()
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
        after = await settled_alone(exporter, lambda page: not value(page, "sidestep_streams"))

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
    assert value(ours, TOKENS) >= generated(answers)
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
    assert value(ours, "sidestep_engine_process_cpu_seconds", process="core") > 0
    assert value(after, "sidestep_engine_up") == 0
    assert_nothing_refused(ours)


async def test_queued_adapters_are_told_from_running_ones(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str, adapters: dict[str, Path]
) -> None:
    """With room for one adapter the other waits, and is shown so, though it never had output."""
    flags = shlex.split("--enable-lora --max-loras 1 --max-lora-rank 8 --max-num-seqs 4")
    modules = [f"{name}={path}" for name, path in adapters.items()]
    environ = {"SIDESTEP_ENDPOINT": endpoint}
    server = VllmServer(
        vllm_python, tiny, home, [*flags, *TAP, "--lora-modules", *modules], environ
    )
    combinations: set[tuple[str, str]] = set()
    async with ExporterProcess(endpoint, home / "exporter.log") as exporter, server:
        await exporter.started()
        await server.started()

        async def told_apart() -> bool:
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
            watching = until(told_apart, 60, "an adapter that waits while the other runs")
            answers, _ = await asyncio.gather(client.ask_all(asks), watching)
        theirs, ours, found = await settled(
            server, exporter, apart=["vllm:lora_requests_info", *BLOCKS, *ARRIVAL]
        )
        report("lora", theirs, answers)

    assert [] == found
    # --max-loras 1: two adapters never run together.
    assert {running for running, _ in combinations} <= {"", *adapters}
    assert [] == labels_of(ours, "vllm:lora_requests_info")
    assert [] == labels_of(ours, "sidestep_lora_requests")
    assert_nothing_refused(ours)


async def test_two_engines_with_two_api_servers(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """Each core tells of its engine; what two front ends count in parts is counted whole."""
    flags = shlex.split(
        "--data-parallel-size 2 --api-server-count 2 --num-gpu-blocks-override 200"
        " --shutdown-timeout 30"
    )
    environ = {"SIDESTEP_ENDPOINT": endpoint}
    server = VllmServer(vllm_python, tiny, home, [*flags, *TAP], environ, command=True)
    steps = "vllm:iteration_tokens_total"
    async with ExporterProcess(endpoint, home / "exporter.log") as exporter:
        await exporter.started()
        async with server:
            await server.started()
            async with Client(server.base) as client:
                answers = [
                    *await client.mixed(leave=False, stop_strings=False),
                    *await client.mixed(leave=False, stop_strings=False),
                ]
            theirs, ours, found = await settled(server, exporter, apart=[steps, *BLOCKS, *ARRIVAL])
            report(
                "core, data parallel",
                ours,
                answers,
                streams=value(ours, "sidestep_streams"),
                ours={engine: count(ours, steps, engine=engine) for engine in "01"},
                native={engine: count(theirs, steps, engine=engine) for engine in "01"},
            )
            await server.stop()

    assert [] == found
    assert_complete([answer for answer in answers if answer.status == 200])
    assert value(ours, "sidestep_streams") == 4
    for engine in "01":
        ours_counted = count(ours, steps, engine=engine)
        assert 0 < ours_counted <= count(theirs, steps, engine=engine)
        assert total(theirs, steps, engine=engine) == total(ours, steps, engine=engine)
        assert ours_counted <= count(ours, "sidestep_iteration_duration_seconds", engine=engine)
        for name in ARRIVAL:
            assert count(theirs, name, engine=engine) == count(ours, name, engine=engine)
    assert_nothing_refused(ours)


async def taken_over(
    server: VllmServer, endpoint: str, log: Path
) -> tuple[list[Ask], list[Answer], Page] | None:
    """What an exporter shows of requests under which the one before was killed; None if they ended before."""
    async with ExporterProcess(endpoint, log) as first, Client(server.base) as client:
        await first.started()
        asks = [Ask(client.text(20), LONG) for _ in range(24)]
        asking = asyncio.create_task(client.ask_all(asks))
        begun = "vllm:time_to_first_token_seconds"
        await settled_alone(first, lambda page: count(page, begun) == len(asks))
        # Until nothing of how they began is on its way any more.
        await asyncio.sleep(1.0)
        first.kill()
        async with ExporterProcess(endpoint, log) as second:
            await second.started()
            is_late = asking.done()
            answers = await asking
            if is_late:
                return None

            def all_ended(page: Page) -> bool:
                return value(page, "vllm:request_success") == len(asks)

            return asks, answers, await settled_alone(second, all_ended)


async def test_an_exporter_that_comes_in_the_middle(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """It hears who is there: no request fails, tokens count, and what is unknown is left out."""
    server = VllmServer(vllm_python, tiny, home, TAP, {"SIDESTEP_ENDPOINT": endpoint})
    async with server:
        await server.started()
        # On a machine of two cores requests may be over before the second exporter has its turn.
        for _ in range(5):
            found = await taken_over(server, endpoint, home / "exporter.log")
            if found is not None:
                break

    assert found is not None
    asks, answers, ours = found
    assert_complete(answers)
    assert len(asks) == value(ours, "vllm:request_success", finished_reason="length")
    assert len(asks) == value(ours, "sidestep_untracked_requests", reason="unknown")
    assert len(asks) == count(ours, "vllm:request_prompt_tokens")
    assert len(asks) == count(ours, "vllm:e2e_request_latency_seconds")
    assert 0 == count(ours, "vllm:request_queue_time_seconds")
    assert 0 == count(ours, "vllm:request_decode_time_seconds")
    assert LONG * len(asks) == total(ours, "vllm:request_generation_tokens")
    latencies = count(ours, "vllm:inter_token_latency_seconds")
    assert 0 < latencies < LONG * len(asks)
    assert value(ours, TOKENS) == latencies + len(asks)
    assert_nothing_refused(ours)


TWO_COLLECTORS = """
import copy

from sidestep_adapters.vllm.kv_block_tap import BlockTap
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


class Both:
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
"""A scheduler whose blocks both collectors follow; what vLLM's own finds goes to its page alone."""


async def test_block_lives_agree_with_the_engines_collector(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """Every sampled block's life from raw events is what vLLM's own collector makes of it."""
    folder = Path(at_start(home, ""))
    (folder / "collectors.py").write_text(TWO_COLLECTORS)
    environ = {"SIDESTEP_ENDPOINT": endpoint, "VLLM_PLUGINS": "none", "PYTHONPATH": str(folder)}
    flags = [*MAIN_FLAGS, "--scheduler-cls", "collectors.Both"]
    server = VllmServer(vllm_python, tiny, home, flags, environ)
    log = home / "exporter.log"
    async with ExporterProcess(endpoint, log, "--kv.sample-rate", "1") as exporter, server:
        await exporter.started()
        await server.started()
        async with Client(server.base) as client:
            # Blocks are followed from when the core has heard the exporter's rate.
            await asyncio.sleep(1.5)
            answers = await client.mixed(leave=False)
            pages: list[Page] = []

            async def agree() -> bool:
                pages[:] = [parse(await server.page()), parse(await exporter.page())]
                return all(map(idle, pages)) and len({value(page, TOKENS) for page in pages}) == 1

            # An idle engine's last steps may be on their way yet, to either page.
            await until(agree, 30, "the last steps on both pages")
            theirs, ours = pages
        report("blocks", ours, answers, theirs=count(theirs, LIFETIME))

    *lives, gaps = BLOCKS
    for name in lives:
        assert count(ours, name) == count(theirs, name) > 300
        # Each collector reads the clock for itself, some microseconds apart.
        assert total(ours, name) == pytest.approx(total(theirs, name), rel=1e-3)
    assert count(ours, gaps) == count(theirs, gaps) > 0
    assert total(ours, gaps) == pytest.approx(total(theirs, gaps), abs=1e-3)
    assert count(ours, "sidestep_kv_block_reuse_gap_seconds") >= count(ours, gaps)
    assert count(ours, "sidestep_kv_block_reuses") == count(ours, LIFETIME)
    assert_nothing_refused(ours)


BROKEN_TAP = """
import itertools
import sidestep_adapters.vllm.kv_block_tap as blocks
import sidestep_adapters.vllm.scheduler_events as events
import sidestep_adapters.vllm.scheduler_tap as tap

turns = itertools.count()

def broken(*_):
    raise RuntimeError("broken on purpose")

resumed = tap._resumed
tap._resumed = lambda cached: broken() if next(turns) % 5 == 4 else resumed(cached)
events.Prompt = broken
blocks.BlockEvents = broken
"""
"""Every fifth batch fails on the step's thread, prompts in the publisher's, blocks at each flush."""


async def test_a_broken_tap_costs_the_engine_nothing(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """Every request is served; what could not be told is counted, and the rest still tells."""
    environ = {"SIDESTEP_ENDPOINT": endpoint, "PYTHONPATH": at_start(home, BROKEN_TAP)}
    server = VllmServer(vllm_python, tiny, home, TAP, environ)
    log = home / "exporter.log"
    async with ExporterProcess(endpoint, log, "--kv.sample-rate", "1") as exporter, server:
        await exporter.started()
        await server.started()
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


async def test_the_synchronous_class_loads_no_stat_logger_and_is_counted(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """In a program of one process the scheduler is all there is; at its end all has arrived."""
    environ = {
        **engine_environ(home),
        "SIDESTEP_ENDPOINT": endpoint,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    script = Path(__file__).with_name("llm_program.py")
    command = [str(vllm_python), str(script), str(tiny)]
    async with ExporterProcess(endpoint, home / "exporter.log") as exporter:
        await exporter.started()
        async with Process(command, environ, home / "program.log") as program:
            await until(lambda: program.code is not None, 300, "end of the program")
            code, output = program.code, program.output
        ours = await settled_alone(exporter, lambda page: not value(page, "sidestep_streams"))
        report("synchronous", ours, [])

    assert code == 0, output[-4000:]
    assert output.split()[-1] == "240"
    assert value(ours, TOKENS) == 240
    assert value(ours, "vllm:request_success", finished_reason="length") == 12
    assert (6, 12.0) == (
        count(ours, "vllm:request_params_n"),
        total(ours, "vllm:request_params_n"),
    )
    assert value(ours, "sidestep_engine_up") == 0
    assert_nothing_refused(ours)
