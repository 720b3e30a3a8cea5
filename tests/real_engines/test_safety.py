"""A real engine keeps serving whatever happens to the exporter, and counters survive restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from fuzz.hostile_exporter import BEHAVIOURS, HostileExporter

from exporters import until
from ports import free_port
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
from real_engines.processes import Server, at_start
from real_engines.sglang_server import RETRACTING, STAND_INS, Sharing, sglang_environ
from real_engines.sites import (
    DUMP_THREADS,
    PUBLISHER,
    STALL,
    TAP,
    TOKENS,
    SglangSite,
    Site,
    SteadyLoad,
    VllmSite,
    completions,
    zmq_threads,
)

pytestmark = pytest.mark.engine

SILENCE = 60.0
"""Seconds within which a killed engine must be reported as down: it takes 30."""


class Engine(NamedTuple):
    """What differs between the engines.

    Attributes:
        loaded: Processes that import the plugin, of which the front end is one.
        warm_up: Requests that a server asks itself at its start.
        streams: One of this many clients asks for streams.
        engines: Engines at the exporter.
        restarted: Engines at the exporter that have a count of restarts.
        latency: Histogram of the requests' latencies.
        gauge: A gauge of the scheduler's.
        environ: Environment in which a mixed load brings it into all states.
        more: Further families that must add up over a restart.
    """

    loaded: int
    warm_up: int
    streams: int
    engines: int
    restarted: int
    latency: str
    gauge: str
    environ: dict[str, str]
    more: Sequence[str] = ()


ENGINES = {
    "vllm": Engine(
        loaded=1, warm_up=0, streams=1, engines=1, restarted=1,
        latency="vllm:e2e_request_latency_seconds", gauge="vllm:num_requests_running", environ={},
    ),
    # A tokenizer, a scheduler, its radix cache, and an engine for families of the processes. The plugin
    # is loaded by the server, its scheduler and its detokenizer.
    "sglang": Engine(
        loaded=3, warm_up=1, streams=2, engines=4, restarted=2,
        latency="sglang:e2e_request_latency_seconds", gauge="sglang:num_running_reqs",
        environ=RETRACTING, more=["sglang:realtime_tokens"],
    ),
}  # fmt: skip
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
MARK_PROCESS = """
import os, pathlib
(pathlib.Path(__file__).parent / str(os.getpid())).touch()
"""
"""Start-up code with which each process that runs Python leaves a file of its number."""
MARK_PLUGIN = """
import sys

def imported(event, details):
    if event == "import" and details[0].startswith("sidestep_adapters."):
        (pathlib.Path(__file__).parent / f"{os.getpid()}.loaded").touch()

sys.addaudithook(imported)
"""
"""Start-up code with which a process that imports the plugin leaves a file; after ``MARK_PROCESS``."""


def interpreters(server: Server) -> list[int]:
    """Return the server's processes that run Python; needs ``MARK_PROCESS``."""
    started = server.log.parent / "start"
    return [pid for pid in server.alive() if (started / str(pid)).exists()]


async def stacks(server: Server) -> str:
    """Return the stacks of the server's threads; needs ``DUMP_THREADS`` and ``MARK_PROCESS``."""
    start = len(server.output)
    for pid in interpreters(server):
        before = len(server.output)
        os.kill(pid, signal.SIGUSR2)
        # The main thread comes last, and its outermost frame is a module's.
        await until(lambda at=before: "in <module>" in server.output[at:], 30, "the stacks")  # type: ignore[misc]
    return server.output[start:]


async def test_exporter_starts_late_is_killed_and_restarts(site: Site) -> None:
    """No request is affected; an exporter that keeps its state has all of the engine's page in the end."""
    engine = ENGINES[site.name]
    state = ["--state.dir", str(site.home / "state")]
    start = at_start(site.home, DUMP_THREADS + MARK_PROCESS)
    async with site.server(environ={"PYTHONPATH": start, **engine.environ}) as server:
        await server.started()
        publishing = (await stacks(server)).count(PUBLISHER)
        async with Client(server.base) as client:
            absent = await client.mixed(streams=engine.streams)
            async with site.exporter(*state) as first:
                await first.started()
                _, late, found_late = await settled(server, first)
                load = SteadyLoad(client, streams=engine.streams)
                await load.more(20)
                await first.stop(signal.SIGKILL)
                await load.more(20)
            async with site.exporter(*state) as second:
                await second.started()
                await load.more(20)
                await load.stop()
                theirs, ours, found = await settled(server, second)
        steady = load.answers
        report(f"{site.name} late and killed", theirs, [*absent, *steady], publishing=publishing)

    assert publishing >= engine.loaded
    assert [] == found_late
    assert [] == found
    assert [400] == [answer.status for answer in absent if answer.status != 200]
    assert_complete(steady)
    assert {TOKENS} == {answer.tokens for answer in steady}
    assert max(answer.longest_gap for answer in steady) < STALL
    assert generated(steady) == value(ours, site.generated) - value(late, site.generated)
    assert_nothing_refused(late)
    assert_nothing_refused(ours)


async def test_counters_continue_after_a_killed_engine_restarts(site: Site) -> None:
    """Totals of a killed engine and of its next process add up; without a next one it is down."""
    engine = ENGINES[site.name]
    families = (site.generated, site.finished, *engine.more)
    totals: Counter[str] = Counter()

    async with site.exporter() as exporter:
        await exporter.started()
        port = free_port()
        for _ in range(2):
            # A server on another port would be another engine.
            async with site.server(port=port) as server:
                await server.started()
                async with Client(server.base) as client:
                    assert_complete(await completions(client, 20))

                async def at_rest(server: Server = server) -> bool:
                    return idle(parse(await server.page()))

                await until(at_rest, 60)
                theirs = parse(await server.page())
                totals.update({name: int(value(theirs, name)) for name in families})
                totals[engine.latency] += int(count(theirs, engine.latency))

                def all_in(page: Page) -> bool:
                    there = {name: value(page, name) for name in families}
                    latencies = {engine.latency: count(page, engine.latency)}
                    return {**there, **latencies} == totals and idle(page)

                ours = await settled_alone(exporter, all_in)
                assert all_in(ours)
                server.kill()

        async def down() -> bool:
            return not value(parse(await exporter.page()), "sidestep_engine_up")

        await until(down, SILENCE, "an engine that is reported as down")
        after = parse(await exporter.page())

    assert value(ours, "sidestep_engine_up") == engine.engines
    assert value(ours, "sidestep_engine_restarts", model_name="tiny") == engine.restarted
    assert {name: value(after, name) for name in families} == {n: totals[n] for n in families}
    assert engine.gauge not in after
    assert_nothing_refused(ours)


async def test_without_an_endpoint_the_plugin_does_nothing(site: Site) -> None:
    """The plugin is loaded but has no thread and no socket, and the page is the same as without it."""
    engine = ENGINES[site.name]
    start = at_start(site.home, DUMP_THREADS + MARK_PROCESS + MARK_PLUGIN)
    pages: list[Page] = []
    found, sockets, loaded = [], [], []
    for environ in ({}, {f"{site.name.upper()}_PLUGINS": "none"}):
        settings = {"PYTHONPATH": start, **environ}
        async with site.server(environ=settings, sends=False) as server:
            await server.started()
            async with Client(server.base) as client:
                assert_complete(await completions(client, 1))

            seen: list[tuple[Page, float]] = []

            async def at_rest(
                server: Server = server, seen: list[tuple[Page, float]] = seen
            ) -> bool:
                page = parse(await server.page())
                if not seen or shape(page) != shape(seen[0][0]):
                    seen[:] = [(page, time.monotonic())]
                is_done = idle(page) and value(page, site.finished) == 1 + engine.warm_up
                # SGLang writes the CPU time of each of its processes every 5 s.
                return is_done and time.monotonic() - seen[0][1] > 6.0

            await until(at_rest, 60)
            pages.append(parse(await server.page()))
            found.append(await stacks(server))
            pids = interpreters(server)
            sockets.append(zmq_threads(pids))
            loaded.append(sum((Path(start) / f"{pid}.loaded").exists() for pid in pids))

    assert loaded[0] >= engine.loaded
    assert loaded[1] == 0
    assert [0, 0] == [stack.count(PUBLISHER) for stack in found]
    assert sockets[0] == sockets[1]
    assert shape(pages[0]) == shape(pages[1])


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
    assert generated(answers) == 30 * TOKENS == value(theirs, vllm.generated)
    assert errors >= steps >= TOKENS
    assert value(ours, vllm.generated) == 0
    # Logged once a minute, with the traceback.
    complaints = [line for line in output.splitlines() if "sidestep: " in line]
    assert 1 <= len(complaints) <= 3
    assert "broken on purpose" in output


async def test_a_hostile_exporter_affects_no_request(vllm: VllmSite) -> None:
    """Front end and core connect to an exporter that floods and resets them: all requests are answered."""
    server = vllm.server(["--max-num-seqs", "32", *TAP])
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
            before = await settled_alone(exporter, lambda page: value(page, vllm.generated) > 0)
            await completions(client, 20)
            expected = value(before, vllm.generated) + 20 * TOKENS
            page = await settled_alone(
                exporter, lambda page: value(page, vllm.generated) >= expected
            )
    assert_nothing_refused(page)


class Embedded(Sharing):
    """The program ``sglang_program.py``, whose page is a file."""

    def __init__(self, site: SglangSite) -> None:
        self.file, self.end = site.home / "page.txt", site.home / "end"
        environ = {
            **sglang_environ(site.home),
            "SIDESTEP_ENDPOINT": site.endpoint,
            "SGLANG_PLUGINS": "none-by-entry-point",
            "PYTHONPATH": str(STAND_INS),
        }
        script = Path(__file__).with_name("sglang_program.py")
        arguments = (script, site.model, self.file, self.end)
        command = [str(site.python), *map(str, arguments)]
        super().__init__(command, environ, site.home / "program.log")

    async def page(self) -> str:
        """Return the page that the program has written last."""
        return self.file.read_text()


async def test_an_engine_inside_a_program(sglang: SglangSite) -> None:
    """``stat_loggers`` taps the collectors; the page of the engine's processes equals ours.

    Families that processes count outside of collectors need the entry point: the detokenizer has
    no others.
    """
    async with sglang.exporter() as exporter:
        await exporter.started()
        async with Embedded(sglang) as program:

            async def has_a_page() -> bool:
                return program.file.exists()

            await program.ready(has_a_page, 300)
            apart = ["sglang:process_cpu_seconds"]
            theirs, ours, found = await settled(program, exporter, apart=apart)
            report("sglang in a program", theirs, [])
            program.end.touch()
            await until(lambda: program.code is not None, 60, "end of the program")
            code, output = program.code, program.output

    assert [] == found
    assert value(ours, sglang.generated) == 8 * 30
    assert value(ours, "sglang:num_requests", is_streaming="true") == 1
    assert code == 0, output[-2000:]
    assert_nothing_refused(ours)
