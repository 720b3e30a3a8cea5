"""The tap in a real vLLM's core against the engine's own page."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import pytest

from engines.comparison import (
    Page,
    assert_complete,
    assert_nothing_refused,
    count,
    engine_families,
    labels_of,
    parse,
    report,
    settled,
    settled_alone,
    total,
    value,
)
from engines.load import MAIN_ENVIRON, MAIN_FLAGS, Ask, Client, generated, reasons
from engines.processes import ExporterProcess, VllmServer, until
from sidestep.catalogue.engine_core import STATES

pytestmark = pytest.mark.engine

TAP = ["--scheduler-cls", "sidestep_adapters.vllm_scheduler.SidestepScheduler"]
NO_PLUGIN = {"VLLM_PLUGINS": "none"}
ARRIVAL = ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds")
"""The engine's own end in the front end, after the output's hop from the core."""
BLOCKS = ("lifetime", "idle_before_evict", "reuse_gap")
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
    flags = [*MAIN_FLAGS, *TAP, "--disable-log-stats"]
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
    assert value(ours, "vllm:generation_tokens") >= generated(answers)
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
            waiting = value(page, "sidestep_lora_requests", state="waiting")
            return waiting > 0 and ("lora-a", "lora-b") in combinations

        async with Client(server.base) as client:
            asks = [Ask(client.text(40), 300, model=name) for name in list(adapters) * 8]
            watching = until(told_apart, 60, "an adapter that waits while the other runs")
            answers, _ = await asyncio.gather(client.ask_all(asks), watching)
        theirs, ours, found = await settled(
            server, exporter, apart=["vllm:lora_requests_info", *ARRIVAL]
        )
        report("lora", theirs, answers)

    assert [] == found
    both = {("lora-a,lora-b", "lora-a,lora-b"), ("lora-b,lora-a", "lora-b,lora-a")}
    assert not combinations & both
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
    # Not on the engine's page without --kv-cache-metrics; the tap samples by itself.
    blocks = [f"vllm:kv_block_{name}_seconds" for name in BLOCKS]
    async with ExporterProcess(endpoint, home / "exporter.log") as exporter:
        await exporter.started()
        async with server:
            await server.started()
            async with Client(server.base) as client:
                answers = [
                    *await client.mixed(leave=False, stop_strings=False),
                    *await client.mixed(leave=False, stop_strings=False),
                ]
            theirs, ours, found = await settled(server, exporter, apart=[steps, *blocks, *ARRIVAL])
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


async def test_an_exporter_that_comes_in_the_middle(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """It hears who is there: no request fails, tokens count, and what is unknown is left out."""
    flags = [*MAIN_FLAGS, *TAP]
    server = VllmServer(vllm_python, tiny, home, flags, {"SIDESTEP_ENDPOINT": endpoint})
    log = home / "exporter.log"
    async with ExporterProcess(endpoint, log) as first, server:
        await first.started()
        await server.started()
        async with Client(server.base) as client:
            asks = [Ask(client.text(20), 600) for _ in range(4)]
            asking = asyncio.create_task(client.ask_all(asks))
            await settled_alone(first, lambda page: value(page, "vllm:generation_tokens") > 100)
            first.kill()
            async with ExporterProcess(endpoint, log) as second:
                await second.started()
                answers = await asking

                def all_ended(page: Page) -> bool:
                    return value(page, "vllm:request_success") == len(asks)

                ours = await settled_alone(second, all_ended)

    assert_complete(answers)
    assert len(asks) == value(ours, "vllm:request_success", finished_reason="length")
    assert len(asks) == value(ours, "sidestep_untracked_requests", reason="unknown")
    assert len(asks) == count(ours, "vllm:request_prompt_tokens")
    assert len(asks) == count(ours, "vllm:e2e_request_latency_seconds")
    assert 0 == count(ours, "vllm:request_queue_time_seconds")
    assert 0 == count(ours, "vllm:request_decode_time_seconds")
    assert 600 * 4 == total(ours, "vllm:request_generation_tokens")
    latencies = count(ours, "vllm:inter_token_latency_seconds")
    assert 0 < latencies < 600 * 4
    assert value(ours, "vllm:generation_tokens") == latencies + 4
    assert_nothing_refused(ours)
