"""Progress in the heartbeats of a real vLLM's core and front end, while it works and while it hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from exporters import until
from heartbeats import Heartbeats
from real_engines.load import Ask, Client
from real_engines.processes import at_start
from real_engines.sites import TAP, VllmSite
from sidestep.protocol.progress import ASLEEP, OVERDUE, PAUSED, Progress

pytestmark = pytest.mark.engine

WEDGES = """
import os, time
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from sidestep_adapters.vllm.scheduler import tapped

def hang_while(name):
    while os.path.exists(os.path.join(os.environ["WEDGES"], name)):
        time.sleep(0.05)

class Wedged(Scheduler):
    def schedule(self, *args, **kwargs):
        hang_while("schedule")
        waiting = self.waiting
        if os.path.exists(os.path.join(os.environ["WEDGES"], "admit")):
            self.waiting = type(waiting)()
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.waiting = waiting

execute_model = MultiprocExecutor.execute_model

def execute(self, *args, **kwargs):
    hang_while("execute")
    return execute_model(self, *args, **kwargs)

MultiprocExecutor.execute_model = execute
Tapped = tapped(Wedged)
"""
"""A scheduler and an executor that hang while a file of that name exists."""
CORE, FRONT_END = "/core", "/api0"


class Engine:
    """The exporter's end of a real engine, and its switches."""

    def __init__(self, exporter: Heartbeats, wedges: Path) -> None:
        self.exporter, self.wedges = exporter, wedges

    async def wait(self, stream: str, condition: Callable[[Progress], bool]) -> Progress:
        """Wait for progress of a stream that fulfils ``condition``, and return it."""
        found: list[Progress] = []

        def holds() -> bool:
            last = self.exporter.last(stream)
            if last is not None and condition(last):
                found.append(last)
            return bool(found)

        await until(holds, 60, f"last: {self.exporter.last(stream)}")
        return found[0]

    async def longest(self, stream: str, tokens: int) -> None:
        """Wait until a heartbeat has brought a longest step of so many tokens."""
        await until(
            lambda: any(
                progress.longest_tokens >= tokens
                for beat in self.exporter.beats
                if beat.stream.endswith(stream)
                for progress in beat.heartbeat.progress
            )
        )

    async def idle(self) -> None:
        """Wait until no process has requests."""
        for stream in (CORE, FRONT_END):
            await self.wait(stream, lambda p: not p.unfinished)


def is_late(progress: Progress) -> bool:
    """Return whether any age is above 3 s."""
    ages = (progress.step_age, progress.waiting_age, progress.output_age)
    return any(age is not None and age > OVERDUE + 1.0 for age in ages)


def names(stack: list[str], function: str) -> bool:
    """Return whether one of the innermost frames is one of ``function``."""
    return any(frame.endswith((f" {function}", f".{function}")) for frame in stack[-4:])


async def test_a_real_engine_that_hangs_says_where(vllm: VllmSite) -> None:
    """In the executor, in its scheduler, and while it admits nobody; it is calm before and after."""
    wedges = vllm.home / "wedges"
    wedges.mkdir()
    start = Path(at_start(vllm.home, ""))
    (start / "wedges.py").write_text(WEDGES)
    flags = ["--scheduler-cls", "wedges.Tapped", "--no-async-scheduling"]
    server = vllm.server(flags, {"PYTHONPATH": str(start), "WEDGES": str(wedges)})
    with Heartbeats(vllm.endpoint) as exporter:
        async with server, Client(server.base) as client:
            engine = Engine(exporter, wedges)
            await server.started()
            assert len(await client.mixed()) > 0
            await engine.idle()
            assert not any(p.stack for beat in exporter.beats for p in beat.heartbeat.progress)
            answered = exporter.last(FRONT_END)
            stepped = exporter.last(CORE)

            found: dict[str, tuple[Progress, Progress]] = {}
            for name in ("execute", "schedule", "admit"):
                (wedges / name).touch()
                ask = asyncio.create_task(client.ask(Ask(client.text(20), 5)))
                core = await engine.wait(CORE, is_late)
                found[name] = core, await engine.wait(FRONT_END, is_late)
                (wedges / name).unlink()
                await ask
                await engine.idle()

    assert answered is not None
    assert answered.steps > 0
    assert stepped is not None
    assert stepped.steps > 10
    for name, (core, front_end) in found.items():
        assert (core.unfinished, front_end.unfinished, front_end.step_tokens) == (1, 1, 20), name
        assert front_end.step_age is not None
        assert core.stack, name
        assert front_end.stack, name
        assert (core.step_age is None) is (name == "admit"), name
    assert (found["execute"][0].step_tokens, found["schedule"][0].step_tokens) == (20, 0)
    for name in ("execute", "schedule"):
        assert names(found[name][0].stack, "hang_while"), found[name][0].stack


async def test_long_prefills_and_sleep_are_reported_as_such(vllm: VllmSite) -> None:
    """A paused core and a sleeping front end owe nothing; steps carry the tokens of long prompts."""
    flags = [*TAP, "--max-num-batched-tokens", "4096"]
    server = vllm.server(flags, {"VLLM_SERVER_DEV_MODE": "1"})
    with Heartbeats(vllm.endpoint) as exporter:
        async with server, Client(server.base) as client:
            engine = Engine(exporter, vllm.home)
            await server.started()
            await client.ask_all([Ask(client.text(2000), 5) for _ in range(4)])
            for stream in (CORE, FRONT_END):
                await engine.longest(stream, 2000)

            # Level 0, the only one on a CPU: requests are accepted and wait.
            await client._session.post(f"{server.base}/sleep?level=0&mode=keep")
            await engine.wait(FRONT_END, lambda p: p.condition == ASLEEP)
            ask = asyncio.create_task(client.ask(Ask(client.text(20), 5)))
            asleep = await engine.wait(FRONT_END, lambda p: p.unfinished == 1)
            paused = await engine.wait(CORE, lambda p: p.condition == PAUSED)
            await client._session.post(f"{server.base}/wake_up?tags=scheduling")
            await engine.wait(FRONT_END, lambda p: not p.condition)
            await engine.wait(CORE, lambda p: not p.condition)
            await ask
            await engine.idle()

    assert (asleep.condition, asleep.step_age) == (ASLEEP, None)
    assert paused.waiting_age is None
