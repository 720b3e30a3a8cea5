"""A real vLLM keeps serving whatever happens to the exporter, and whatever the plugin does wrong."""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from pathlib import Path

import pytest
from fuzz.hostile_exporter import BEHAVIOURS, HostileExporter

from exporters import until
from real_engines.comparison import (
    Page,
    assert_complete,
    assert_nothing_refused,
    count,
    idle,
    parse,
    report,
    settled,
    settled_alone,
    shape,
    value,
)
from real_engines.load import Client, generated
from real_engines.processes import ExporterProcess, VllmServer, at_start
from real_engines.sites import (
    DUMP_THREADS,
    PUBLISHER,
    STALL,
    TOKENS,
    SteadyLoad,
    VllmSite,
    completions,
    zmq_threads,
)

pytestmark = pytest.mark.engine

GENERATED = "vllm:generation_tokens"
BREAK_TRANSLATION = """
import itertools
import sidestep_adapters.vllm.stats as stats

capture, turns = stats._capture, itertools.count()

def broken(*_, **__):
    raise RuntimeError("broken on purpose")

stats._capture = lambda source: broken() if next(turns) % 5 == 4 else capture(source)
stats.to_wire = broken
"""
"""Start-up code: every fifth capture fails on the serving event loop, the other records fail in the
publisher thread.
"""


async def stacks(server: VllmServer) -> str:
    """Return the stacks of the server's threads; needs ``DUMP_THREADS``."""
    before = len(server.output)
    server.send(signal.SIGUSR2)
    # The main thread comes last, and its outermost frame is runpy's.
    await until(lambda: "_run_module_as_main" in server.output[before:], 30, "the stacks")
    return server.output[before:]


async def page_after(exporter: ExporterProcess, before: Page, tokens: int) -> Page:
    """Return the exporter's page once it has ``tokens`` more generated tokens than ``before``."""
    expected = value(before, GENERATED) + tokens
    return await settled_alone(exporter, lambda page: value(page, GENERATED) >= expected)


async def test_exporter_starts_late_is_killed_and_restarts(vllm: VllmSite) -> None:
    """No request is affected; the late exporter gets everything, its successor what comes after it."""
    environ = {"PYTHONPATH": at_start(vllm.home, DUMP_THREADS)}
    server = vllm.server(["--max-num-seqs", "32"], environ)
    async with server, Client(server.base) as client:
        await server.started()
        assert PUBLISHER in await stacks(server)
        absent = await client.mixed()

        async with vllm.exporter() as first:
            await first.started()
            _, late, found = await settled(server, first)

            load = SteadyLoad(client)
            await load.more(40)
            killed_at = time.monotonic()
            await first.stop(signal.SIGKILL)
            await load.more(40)
            back_at = time.monotonic()

        async with vllm.exporter() as second:
            await second.started()
            resumed = await settled_alone(second, lambda page: value(page, GENERATED) > 0)
            await load.more(40)
            await load.stop()
            rest = await settled_alone(second, idle)
            theirs_rest = parse(await server.page())
            more = await completions(client, 20)
            last = await page_after(second, rest, 20 * TOKENS)

    steady = load.answers
    phases = {
        "before": [a for a in steady if a.ended_at < killed_at],
        "down": [a for a in steady if a.asked_at < back_at and a.ended_at > killed_at],
        "after": [a for a in steady if a.asked_at > back_at],
    }
    figures = {
        name: {
            "n": len(phase),
            "median_ms": round(1e3 * statistics.median(a.seconds for a in phase), 1),
            "longest_gap_ms": round(1e3 * max(a.longest_gap for a in phase), 1),
        }
        for name, phase in phases.items()
    }
    lost = value(theirs_rest, GENERATED) - value(rest, GENERATED)
    report("late and killed", late, absent, lost_with_the_first=lost, **figures)

    assert [] == found
    assert_nothing_refused(late)
    assert [400] == [answer.status for answer in absent if answer.status != 200]
    assert_complete([*steady, *more])
    assert {TOKENS} == {answer.tokens for answer in [*steady, *more]}
    assert max(answer.longest_gap for answer in steady) < STALL
    assert value(resumed, GENERATED) > 0
    # The successor starts at 0, and has at least what was asked after its predecessor's end.
    later = [answer for answer in steady if answer.asked_at > killed_at]
    assert generated(later) <= value(rest, GENERATED)
    assert 20 * TOKENS == value(last, GENERATED) - value(rest, GENERATED)
    assert_nothing_refused(last)


async def test_counters_continue_after_a_killed_engine_restarts(vllm: VllmSite) -> None:
    """Totals of a killed engine and of its next process add up; the restart is counted."""
    pages: list[Page] = []
    async with vllm.exporter() as exporter:
        await exporter.started()
        for expected in (20 * TOKENS, 40 * TOKENS):
            async with vllm.server() as server:
                await server.started()
                async with Client(server.base) as client:
                    assert_complete(await completions(client, 20))
                ours = await settled_alone(
                    exporter,
                    lambda page, tokens=expected: (  # type: ignore[misc]
                        idle(page) and value(page, GENERATED) >= tokens
                    ),
                )
                pages.append(ours)
                server.kill()

    ended = [value(page, "vllm:request_success", finished_reason="length") for page in pages]
    assert [20 * TOKENS, 40 * TOKENS] == [value(page, GENERATED) for page in pages]
    assert [20, 40] == ended
    assert [0, 1] == [value(page, "sidestep_engine_restarts") for page in pages]
    assert_nothing_refused(pages[1])


async def test_broken_translation_costs_metrics_only(vllm: VllmSite) -> None:
    """Requests succeed although every record fails to translate, and each failure is counted."""
    environ = {"PYTHONPATH": at_start(vllm.home, BREAK_TRANSLATION)}
    server = vllm.server(["--max-num-seqs", "32"], environ)
    async with vllm.with_exporter(server) as exporter:
        async with Client(server.base) as client:
            answers = await completions(client, 30)
        theirs = parse(await server.page())
        steps = count(theirs, "vllm:iteration_tokens_total")
        ours = await settled_alone(
            exporter, lambda page: value(page, "sidestep_stream_errors") >= steps
        )
        errors = value(ours, "sidestep_stream_errors")
        report("broken translation", theirs, answers, errors=errors)
        output = server.output

    assert_complete(answers)
    assert generated(answers) == 30 * TOKENS == value(theirs, GENERATED)
    assert errors >= steps >= TOKENS
    assert value(ours, GENERATED) == 0
    # Logged once a minute, with the traceback.
    complaints = [line for line in output.splitlines() if "sidestep: " in line]
    assert 1 <= len(complaints) <= 3
    assert "broken on purpose" in output


async def test_without_an_endpoint_the_plugin_does_nothing(vllm: VllmSite) -> None:
    """The plugin is loaded but has no thread and no socket, and the page is the same as without it."""
    start = at_start(vllm.home, DUMP_THREADS)
    with_it = vllm.server([], {"PYTHONPATH": start}, sends=False)
    async with with_it:
        await with_it.started()
        without = vllm.server([], {"PYTHONPATH": start, "VLLM_PLUGINS": "none"}, sends=False)
        async with without:
            await without.started()
            pages, found, sockets = [], [], []
            for server in (with_it, without):
                async with Client(server.base) as client:
                    assert_complete(await completions(client, 1))

                async def at_rest(server: VllmServer = server) -> bool:
                    page = parse(await server.page())
                    return idle(page) and value(page, "vllm:request_success") == 1

                await until(at_rest, 30)
                pages.append(parse(await server.page()))
                found.append(await stacks(server))
                sockets.append(zmq_threads([server.pid]))

    assert "sidestep_adapters.vllm.plugin:SidestepStatLogger" in with_it.output
    assert [False, False] == [PUBLISHER in stack for stack in found]
    assert sockets[0] == sockets[1]
    assert shape(pages[0]) == shape(pages[1])


async def test_a_hostile_exporter_affects_no_request(vllm: VllmSite) -> None:
    """Front end and core connect to an exporter that floods and resets them: all requests are answered."""
    core = "sidestep_adapters.vllm.scheduler.SidestepScheduler"
    server = vllm.server(["--max-num-seqs", "32", "--scheduler-cls", core])
    path = Path(vllm.endpoint.removeprefix("ipc://"))
    async with server, Client(server.base) as client:
        await server.started()
        for behaviour in BEHAVIOURS.values():
            hostile = HostileExporter(path, behaviour)
            try:
                answers = await completions(client, 20)
                await until(lambda hostile=hostile: hostile.connections >= 2, 90)  # type: ignore[misc]
            finally:
                await asyncio.to_thread(hostile.close)

            assert_complete(answers)
            assert max(answer.longest_gap for answer in answers) < STALL
        async with vllm.exporter() as exporter:
            await exporter.started()
            before = await settled_alone(exporter, lambda page: value(page, GENERATED) > 0)
            await completions(client, 20)
            page = await page_after(exporter, before, 20 * TOKENS)
    assert_nothing_refused(page)
