"""Serving never depends on the exporter, and what is counted survives both."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

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
from real_engines.processes import ExporterProcess, at_start, until
from real_engines.sglang_runs import MIXED
from real_engines.sglang_server import STAND_INS, SglangServer, Sharing, sglang_environ

pytestmark = pytest.mark.engine

TOKENS = 40
STALL = 10.0
"""Seconds between two tokens that no busy machine explains; the engine makes one in 10 ms."""
SILENCE = 60.0
"""Seconds within which an engine that was killed must be known to be down: it takes 30."""
PUBLISHER = "sidestep_adapters/publisher/publisher.py"
DUMP_THREADS = """
import faulthandler, os, pathlib, signal
faulthandler.register(signal.SIGUSR2)
(pathlib.Path(__file__).parent / str(os.getpid())).touch()
"""

NOTICE_PLUGIN = """
import sys

def noticed(event, details):
    if event == "import" and details[0].startswith("sidestep_adapters."):
        (pathlib.Path(__file__).parent / f"{os.getpid()}.loaded").touch()

sys.addaudithook(noticed)
"""


def interpreters(server: SglangServer) -> list[int]:
    """The server's processes that run Python; needs ``DUMP_THREADS``."""
    started = server.log.parent / "start"
    return [pid for pid in server.alive() if (started / str(pid)).exists()]


async def threads(server: SglangServer) -> str:
    """The stacks of all threads of the server; needs ``DUMP_THREADS``."""
    start = len(server.output)
    for pid in interpreters(server):
        before = len(server.output)
        os.kill(pid, signal.SIGUSR2)
        # The main thread comes last, and its outermost frame is a module's.
        await until(lambda at=before: "in <module>" in server.output[at:], 30, "the stacks")  # type: ignore[misc]
    return server.output[start:]


def zmq_threads(server: SglangServer) -> Counter[str]:
    """The server's threads that belong to ZMQ contexts."""
    names = [
        task.read_text().strip()
        for pid in interpreters(server)
        for task in Path(f"/proc/{pid}/task").glob("*/comm")
    ]
    return Counter(name for name in names if name.startswith("ZMQ"))


async def workers(client: Client, goes_on: Callable[[], bool], answers: list[Answer]) -> None:
    """Four at a time until told to end, every other one streamed."""

    async def worker(number: int) -> None:
        while goes_on():
            answers.append(await client.ask(Ask(client.text(30), TOKENS, stream=number % 2 > 0)))

    await asyncio.gather(*map(worker, range(4)))


async def test_exporter_comes_late_dies_and_comes_back(
    sglang_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """No request notices; an exporter that keeps its state has all of the engine's page in the end."""
    log, kept = home / "exporter.log", ["--state.dir", str(home / "state")]
    environ = {
        "SIDESTEP_ENDPOINT": endpoint,
        "PYTHONPATH": at_start(home, DUMP_THREADS),
        **MIXED.environ,
    }
    async with SglangServer(sglang_python, tiny, home, environ=environ) as server:
        await server.started()
        publishing = (await threads(server)).count(PUBLISHER)
        async with Client(server.base) as client:
            absent = await MIXED.load(client)
            async with ExporterProcess(endpoint, log, *kept) as first:
                await first.started()
                _, late, found_late = await settled(server, first)

                going = True
                steady: list[Answer] = []
                load = asyncio.create_task(workers(client, lambda: going, steady))
                await until(lambda: len(steady) >= 20)
                await first.stop(signal.SIGKILL)
                now = len(steady)
                await until(lambda: len(steady) >= now + 20)
            async with ExporterProcess(endpoint, log, *kept) as second:
                await second.started()
                now = len(steady)
                await until(lambda: len(steady) >= now + 20)
                going = False
                await load
                theirs, ours, found = await settled(server, second)
        report("sglang late and killed", theirs, [*absent, *steady], publishing=publishing)

    assert publishing >= 3
    assert [] == found_late
    assert [] == found
    assert [400] == [answer.status for answer in absent if answer.status != 200]
    assert_complete(steady)
    assert {TOKENS} == {answer.tokens for answer in steady}
    assert max(answer.longest_gap for answer in steady) < STALL
    grown = value(ours, "sglang:generation_tokens") - value(late, "sglang:generation_tokens")
    assert generated(steady) == grown
    assert_nothing_refused(late)
    assert_nothing_refused(ours)


async def test_killed_engine_goes_on_counting_when_it_is_back(
    sglang_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """Totals of a killed engine and of its next process add up; without a next one it is down."""
    environ = {"SIDESTEP_ENDPOINT": endpoint}
    families = ("sglang:generation_tokens", "sglang:num_requests", "sglang:realtime_tokens")
    latency = "sglang:e2e_request_latency_seconds"
    totals: Counter[str] = Counter()

    def ups(page: Page) -> float:
        return value(page, "sidestep_engine_up")

    async with ExporterProcess(endpoint, home / "exporter.log") as exporter:
        await exporter.started()
        for _ in range(2):
            async with SglangServer(sglang_python, tiny, home, environ=environ) as server:
                await server.started()
                async with Client(server.base) as client:
                    assert_complete(
                        await client.ask_all([Ask(client.text(30), TOKENS) for _ in range(20)])
                    )

                async def at_rest(server: SglangServer = server) -> bool:
                    return idle(parse(await server.page()))

                await until(at_rest)
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

        await until(down, SILENCE, "an engine that is known to be down")
        after = parse(await exporter.page())

    # A tokenizer, a scheduler, its radix cache, and what processes have of their own.
    assert ups(ours) == 4
    assert value(ours, "sidestep_engine_restarts", model_name="tiny") == 2
    assert {name: value(after, name) for name in families} == {n: totals[n] for n in families}
    assert "sglang:num_running_reqs" not in after
    assert_nothing_refused(ours)


async def test_without_an_endpoint_the_plugin_does_nothing(
    sglang_python: Path, tiny: Path, home: Path
) -> None:
    """It is found and loaded, but has no thread and no socket, and the page is as without it."""
    start = at_start(home, DUMP_THREADS + NOTICE_PLUGIN)
    pages: list[Page] = []
    stacks, sockets, loaded = [], [], []
    for environ in ({"PYTHONPATH": start}, {"PYTHONPATH": start, "SGLANG_PLUGINS": "none"}):
        async with SglangServer(sglang_python, tiny, home, environ=environ) as server:
            await server.started()
            async with Client(server.base) as client:
                assert_complete([await client.ask(Ask(client.text(30), TOKENS))])

            async def at_rest(server: SglangServer = server) -> bool:
                page = parse(await server.page())
                return idle(page) and value(page, "sglang:num_requests") == 2

            await until(at_rest)
            pages.append(parse(await server.page()))
            stacks.append(await threads(server))
            sockets.append(zmq_threads(server))
            pids = interpreters(server)
            loaded.append(sum((Path(start) / f"{pid}.loaded").exists() for pid in pids))

    # By the server, its scheduler and its detokenizer.
    assert [3, 0] == loaded
    assert [0, 0] == [stack.count(PUBLISHER) for stack in stacks]
    assert sockets[0] == sockets[1]
    assert shape(pages[0]) == shape(pages[1])


class Embedded(Sharing):
    """``sglang_program.py``, whose page is a file."""

    def __init__(self, python: Path, model: Path, home: Path, endpoint: str) -> None:
        self.file, self.end = home / "page.txt", home / "end"
        environ = {
            **sglang_environ(home),
            "SIDESTEP_ENDPOINT": endpoint,
            "SGLANG_PLUGINS": "none-by-entry-point",
            "PYTHONPATH": str(STAND_INS),
        }
        script = Path(__file__).with_name("sglang_program.py")
        command = [str(python), str(script), str(model), str(self.file), str(self.end)]
        super().__init__(command, environ, home / "program.log")

    async def page(self) -> str:
        """What it wrote last."""
        return self.file.read_text()


async def test_an_engine_inside_a_program(
    sglang_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """``stat_loggers`` takes the collectors by hand; the page of the engine's processes is ours.

    What processes count outside of collectors takes the entry point: of the detokenizer nothing.
    """
    apart = ["sglang:process_cpu_seconds"]
    async with ExporterProcess(endpoint, home / "exporter.log") as exporter:
        await exporter.started()
        async with Embedded(sglang_python, tiny, home, endpoint) as program:

            async def shown() -> bool:
                return program.file.exists()

            await program.ready(shown, 300)
            theirs, ours, found = await settled(program, exporter, apart=apart)
            report("sglang in a program", theirs, [])
            program.end.touch()
            await until(lambda: program.code is not None, 60, "end of the program")
            code, output = program.code, program.output

    assert [] == found
    assert value(ours, "sglang:generation_tokens") == 8 * 30
    assert value(ours, "sglang:num_requests", is_streaming="true") == 1
    assert code == 0, output[-2000:]
    assert_nothing_refused(ours)
