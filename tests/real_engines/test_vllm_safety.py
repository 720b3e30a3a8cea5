"""Serving never depends on the exporter, nor on the plug-in being right."""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz.hostile_exporter import BEHAVIOURS, HostileExporter

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
from real_engines.load import Answer, Ask, Client, generated
from real_engines.processes import ExporterProcess, VllmServer, at_start, until

pytestmark = pytest.mark.engine

TOKENS = 40
STALL = 10.0
"""Seconds between two tokens that no busy machine explains; the engine makes one in 5 ms."""
PUBLISHER = "sidestep_adapters/publisher/publisher.py"

DUMP_THREADS = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR2)
"""
BREAK_TRANSLATION = """
import itertools
import sidestep_adapters.vllm.stats as plugin

own, turns = plugin._own, itertools.count()

def broken(*_):
    raise RuntimeError("broken on purpose")

plugin._own = lambda source: broken() if next(turns) % 5 == 4 else own(source)
plugin.to_wire = broken
"""
"""Every other record fails on the serving event loop, the others in the publisher's thread."""


async def threads(server: VllmServer) -> str:
    """The stacks of the server's threads; needs ``DUMP_THREADS``."""
    before = len(server.output)
    server.send(signal.SIGUSR2)
    # The main thread comes last, and its outermost frame is runpy's.
    await until(lambda: "_run_module_as_main" in server.output[before:], 30, "the stacks")
    return server.output[before:]


async def workers(client: Client, goes_on: Callable[[], bool], answers: list[Answer]) -> None:
    """Four at a time until told to end."""

    async def worker() -> None:
        while goes_on():
            answers.append(await client.ask(Ask(client.text(30), TOKENS)))

    await asyncio.gather(*(worker() for _ in range(4)))


async def test_exporter_comes_late_dies_and_comes_back(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """No request notices; the late exporter gets everything, its successor what came after it."""
    log = home / "exporter.log"
    environ = {"SIDESTEP_ENDPOINT": endpoint, "PYTHONPATH": at_start(home, DUMP_THREADS)}
    server = VllmServer(vllm_python, tiny, home, ["--max-num-seqs", "32"], environ)
    async with server, Client(server.base) as client:
        await server.started()
        assert PUBLISHER in await threads(server)
        absent = await client.mixed()

        async with ExporterProcess(endpoint, log) as first:
            await first.started()
            _, late, found = await settled(server, first)

            going = True
            steady: list[Answer] = []
            load = asyncio.create_task(workers(client, lambda: going, steady))
            await until(lambda: len(steady) >= 40, 120)
            killed_at, before = time.monotonic(), len(steady)
            await first.stop(signal.SIGKILL)
            await until(lambda: len(steady) >= before + 40, 120)
            back_at = time.monotonic()

        async with ExporterProcess(endpoint, log) as second:
            await second.started()
            resumed = await settled_alone(
                second, lambda page: value(page, "vllm:generation_tokens") > 0
            )
            now = len(steady)
            await until(lambda: len(steady) >= now + 40, 120)
            going = False
            await load
            rest = await settled_alone(second, idle)
            theirs_rest = parse(await server.page())
            more = await client.ask_all([Ask(client.text(30), TOKENS) for _ in range(20)])

            def complete(page: Page) -> bool:
                grown = value(page, "vllm:generation_tokens") - value(
                    rest, "vllm:generation_tokens"
                )
                return grown >= 20 * TOKENS

            last = await settled_alone(second, complete)

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
    unseen = value(theirs_rest, "vllm:generation_tokens") - value(rest, "vllm:generation_tokens")
    report("late and killed", late, absent, gone_with_the_first=unseen, **figures)

    assert [] == found
    assert_nothing_refused(late)
    assert [400] == [answer.status for answer in absent if answer.status != 200]
    assert_complete([*steady, *more])
    assert {TOKENS} == {answer.tokens for answer in [*steady, *more]}
    assert max(answer.longest_gap for answer in steady) < STALL
    assert value(resumed, "vllm:generation_tokens") > 0
    # The successor starts anew, and has at least all that was asked after its predecessor's end.
    later = [answer for answer in steady if answer.asked_at > killed_at]
    assert generated(later) <= value(rest, "vllm:generation_tokens")
    assert 20 * TOKENS == (
        value(last, "vllm:generation_tokens") - value(rest, "vllm:generation_tokens")
    )
    assert_nothing_refused(last)


async def test_killed_engine_goes_on_counting_when_it_is_back(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """Totals of a killed engine and of its next process add up; the restart is counted."""
    environ = {"SIDESTEP_ENDPOINT": endpoint}
    pages: list[Page] = []
    async with ExporterProcess(endpoint, home / "exporter.log") as exporter:
        await exporter.started()
        for lives in (1, 2):
            async with VllmServer(vllm_python, tiny, home, [], environ) as server:
                await server.started()
                async with Client(server.base) as client:
                    assert_complete(
                        await client.ask_all([Ask(client.text(30), TOKENS) for _ in range(20)])
                    )
                expected = lives * 20 * TOKENS
                ours = await settled_alone(
                    exporter,
                    lambda page, tokens=expected: (  # type: ignore[misc]
                        idle(page) and value(page, "vllm:generation_tokens") >= tokens
                    ),
                )
                pages.append(ours)
                server.kill()

    tokens = [value(page, "vllm:generation_tokens") for page in pages]
    ended = [value(page, "vllm:request_success", finished_reason="length") for page in pages]
    restarts = [value(page, "sidestep_engine_restarts") for page in pages]
    assert [20 * TOKENS, 40 * TOKENS] == tokens
    assert [20, 40] == ended
    assert [0, 1] == restarts
    assert_nothing_refused(pages[1])


async def test_broken_translation_costs_metrics_only(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """Where every record fails to translate, all requests succeed and each failure is counted."""
    environ = {
        "SIDESTEP_ENDPOINT": endpoint,
        "PYTHONPATH": at_start(home, BREAK_TRANSLATION),
    }
    server = VllmServer(vllm_python, tiny, home, ["--max-num-seqs", "32"], environ)
    async with ExporterProcess(endpoint, home / "exporter.log") as exporter, server:
        await exporter.started()
        await server.started()
        async with Client(server.base) as client:
            answers = await client.ask_all([Ask(client.text(30), TOKENS) for _ in range(30)])
        theirs = parse(await server.page())
        steps = count(theirs, "vllm:iteration_tokens_total")

        def counted(page: Page) -> bool:
            return value(page, "sidestep_stream_errors") >= steps

        ours = await settled_alone(exporter, counted)
        errors = value(ours, "sidestep_stream_errors")
        report("broken translation", theirs, answers, errors=errors)
        output = server.output

    assert_complete(answers)
    assert generated(answers) == 30 * TOKENS == value(theirs, "vllm:generation_tokens")
    assert errors >= steps >= TOKENS
    assert value(ours, "vllm:generation_tokens") == 0
    # Said once a minute, with the traceback.
    complaints = [line for line in output.splitlines() if "sidestep: " in line]
    assert 1 <= len(complaints) <= 3
    assert "broken on purpose" in output


async def test_without_an_endpoint_the_plugin_does_nothing(
    vllm_python: Path, tiny: Path, home: Path
) -> None:
    """It is found and loaded, but has no thread and no socket, and the page is as without it."""
    start = at_start(home, DUMP_THREADS)
    with_it = VllmServer(vllm_python, tiny, home, [], {"PYTHONPATH": start})
    async with with_it:
        await with_it.started()
        environ = {"PYTHONPATH": start, "VLLM_PLUGINS": "none"}
        without = VllmServer(vllm_python, tiny, home, [], environ)
        async with without:
            await without.started()
            pages, stacks, sockets = [], [], []
            for server in (with_it, without):
                async with Client(server.base) as client:
                    assert_complete([await client.ask(Ask(client.text(30), TOKENS))])

                async def at_rest(server: VllmServer = server) -> bool:
                    page = parse(await server.page())
                    return idle(page) and value(page, "vllm:request_success") == 1

                await until(at_rest, 30)
                pages.append(parse(await server.page()))
                stacks.append(await threads(server))
                sockets.append(zmq_threads(server.pid))

    assert "sidestep_adapters.vllm.plugin:SidestepStatLogger" in with_it.output
    assert [False, False] == [PUBLISHER in stack for stack in stacks]
    assert sockets[0] == sockets[1]
    assert shape(pages[0]) == shape(pages[1])


def zmq_threads(pid: int) -> Counter[str]:
    """A process's threads that belong to ZMQ contexts."""
    names = [task.read_text().strip() for task in Path(f"/proc/{pid}/task").glob("*/comm")]
    return Counter(name for name in names if name.startswith("ZMQ"))


async def test_no_request_notices_a_hostile_exporter(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """Front end and core connect to whoever floods and resets them: all requests are answered."""
    core = "sidestep_adapters.vllm.scheduler.SidestepScheduler"
    flags = ["--max-num-seqs", "32", "--scheduler-cls", core]
    path = Path(endpoint.removeprefix("ipc://"))
    environ = {"SIDESTEP_ENDPOINT": endpoint}
    server = VllmServer(vllm_python, tiny, home, flags, environ)
    async with server, Client(server.base) as client:
        await server.started()
        for behaviour in BEHAVIOURS.values():
            hostile = HostileExporter(path, behaviour)
            try:
                answers = await client.ask_all([Ask(client.text(30), TOKENS) for _ in range(20)])
                await until(lambda hostile=hostile: hostile.connections >= 2, 90)  # type: ignore[misc]
            finally:
                await asyncio.to_thread(hostile.close)

            assert_complete(answers)
            assert max(answer.longest_gap for answer in answers) < STALL
        async with ExporterProcess(endpoint, home / "exporter.log") as exporter:
            await exporter.started()
            before = await settled_alone(
                exporter, lambda page: value(page, "vllm:generation_tokens") > 0
            )
            await client.ask_all([Ask(client.text(30), TOKENS) for _ in range(20)])

            def complete(page: Page) -> bool:
                grown = value(page, "vllm:generation_tokens") - value(
                    before, "vllm:generation_tokens"
                )
                return grown >= 20 * TOKENS

            page = await settled_alone(exporter, complete)
    assert_nothing_refused(page)
