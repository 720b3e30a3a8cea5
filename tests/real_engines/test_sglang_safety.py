"""A real SGLang keeps serving whatever happens to the exporter, and counters survive restarts."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

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
from real_engines.processes import at_start
from real_engines.sglang_runs import MIXED
from real_engines.sglang_server import STAND_INS, SglangServer, Sharing, sglang_environ
from real_engines.sites import (
    DUMP_THREADS,
    PUBLISHER,
    STALL,
    TOKENS,
    SglangSite,
    SteadyLoad,
    completions,
    zmq_threads,
)

pytestmark = pytest.mark.engine

GENERATED = "sglang:generation_tokens"
SILENCE = 60.0
"""Seconds within which a killed engine must be reported as down: it takes 30."""
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


def interpreters(server: SglangServer) -> list[int]:
    """Return the server's processes that run Python; needs ``MARK_PROCESS``."""
    started = server.log.parent / "start"
    return [pid for pid in server.alive() if (started / str(pid)).exists()]


async def stacks(server: SglangServer) -> str:
    """Return the stacks of the server's threads; needs ``DUMP_THREADS`` and ``MARK_PROCESS``."""
    start = len(server.output)
    for pid in interpreters(server):
        before = len(server.output)
        os.kill(pid, signal.SIGUSR2)
        # The main thread comes last, and its outermost frame is a module's.
        await until(lambda at=before: "in <module>" in server.output[at:], 30, "the stacks")  # type: ignore[misc]
    return server.output[start:]


async def test_exporter_starts_late_is_killed_and_restarts(sglang: SglangSite) -> None:
    """No request is affected; an exporter that keeps its state has all of the engine's page in the end."""
    state = ["--state.dir", str(sglang.home / "state")]
    start = at_start(sglang.home, DUMP_THREADS + MARK_PROCESS)
    async with sglang.server(environ={"PYTHONPATH": start, **MIXED.environ}) as server:
        await server.started()
        publishing = (await stacks(server)).count(PUBLISHER)
        async with Client(server.base) as client:
            absent = await MIXED.load(client)
            async with sglang.exporter(*state) as first:
                await first.started()
                _, late, found_late = await settled(server, first)
                load = SteadyLoad(client, streams=2)
                await load.more(20)
                await first.stop(signal.SIGKILL)
                await load.more(20)
            async with sglang.exporter(*state) as second:
                await second.started()
                await load.more(20)
                await load.stop()
                theirs, ours, found = await settled(server, second)
        steady = load.answers
        report("sglang late and killed", theirs, [*absent, *steady], publishing=publishing)

    assert publishing >= 3
    assert [] == found_late
    assert [] == found
    assert [400] == [answer.status for answer in absent if answer.status != 200]
    assert_complete(steady)
    assert {TOKENS} == {answer.tokens for answer in steady}
    assert max(answer.longest_gap for answer in steady) < STALL
    assert generated(steady) == value(ours, GENERATED) - value(late, GENERATED)
    assert_nothing_refused(late)
    assert_nothing_refused(ours)


async def test_counters_continue_after_a_killed_engine_restarts(sglang: SglangSite) -> None:
    """Totals of a killed engine and of its next process add up; without a next one it is down."""
    families = (GENERATED, "sglang:num_requests", "sglang:realtime_tokens")
    latency = "sglang:e2e_request_latency_seconds"
    totals: Counter[str] = Counter()

    def ups(page: Page) -> float:
        return value(page, "sidestep_engine_up")

    async with sglang.exporter() as exporter:
        await exporter.started()
        for _ in range(2):
            async with sglang.server() as server:
                await server.started()
                async with Client(server.base) as client:
                    assert_complete(await completions(client, 20))

                async def at_rest(server: SglangServer = server) -> bool:
                    return idle(parse(await server.page()))

                await until(at_rest, 60)
                theirs = parse(await server.page())
                totals.update({name: int(value(theirs, name)) for name in families})
                totals[latency] += int(count(theirs, latency))

                def all_in(page: Page) -> bool:
                    there = {name: value(page, name) for name in families}
                    return {**there, latency: count(page, latency)} == totals and idle(page)

                ours = await settled_alone(exporter, all_in)
                assert all_in(ours)
                server.kill()

        async def down() -> bool:
            return not ups(parse(await exporter.page()))

        await until(down, SILENCE, "an engine that is reported as down")
        after = parse(await exporter.page())

    # A tokenizer, a scheduler, its radix cache, and an engine for families of the processes.
    assert ups(ours) == 4
    assert value(ours, "sidestep_engine_restarts", model_name="tiny") == 2
    assert {name: value(after, name) for name in families} == {n: totals[n] for n in families}
    assert "sglang:num_running_reqs" not in after
    assert_nothing_refused(ours)


async def test_without_an_endpoint_the_plugin_does_nothing(sglang: SglangSite) -> None:
    """The plugin is loaded but has no thread and no socket, and the page is the same as without it."""
    start = at_start(sglang.home, DUMP_THREADS + MARK_PROCESS + MARK_PLUGIN)
    pages: list[Page] = []
    found, sockets, loaded = [], [], []
    for environ in ({}, {"SGLANG_PLUGINS": "none"}):
        settings = {"PYTHONPATH": start, **environ}
        async with sglang.server(environ=settings, sends=False) as server:
            await server.started()
            async with Client(server.base) as client:
                assert_complete(await completions(client, 1))

            async def at_rest(server: SglangServer = server) -> bool:
                page = parse(await server.page())
                return idle(page) and value(page, "sglang:num_requests") == 2

            await until(at_rest, 60)
            pages.append(parse(await server.page()))
            found.append(await stacks(server))
            pids = interpreters(server)
            sockets.append(zmq_threads(pids))
            loaded.append(sum((Path(start) / f"{pid}.loaded").exists() for pid in pids))

    # By the server, its scheduler and its detokenizer.
    assert [3, 0] == loaded
    assert [0, 0] == [stack.count(PUBLISHER) for stack in found]
    assert sockets[0] == sockets[1]
    assert shape(pages[0]) == shape(pages[1])


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
    assert value(ours, GENERATED) == 8 * 30
    assert value(ours, "sglang:num_requests", is_streaming="true") == 1
    assert code == 0, output[-2000:]
    assert_nothing_refused(ours)
