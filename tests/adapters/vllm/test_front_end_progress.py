"""Progress of vLLM's front end, whose plugin has no reference to it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_vllm import AsyncLLM, LLMEngine, SchedulerStats, importable
from heartbeats import Heartbeats
from sidestep.protocol.progress import ASLEEP, OVERDUE, Progress
from sidestep_adapters.vllm.front_end_progress import (
    CALM,
    FrontEndProgress,
    LoopWatch,
    calling_front_end,
)

WAKE = 0.25


def identity(engine: int) -> bytes:
    """Return an engine's identity in vLLM's client."""
    return engine.to_bytes(2, "little")


class Logger:
    """A stat logger that looks for the front end, and nothing else."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        assert vllm_config
        front_end = calling_front_end()
        self.progress = None if front_end is None else FrontEndProgress(front_end, engine_indexes)


class Timed:
    """A front end whose records, and readings, a test makes at simulated times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        module = "sidestep_adapters.vllm.front_end_progress"
        monkeypatch.setattr(f"{module}._monotonic", lambda: self.now)

    def make(self, client: Any = None, *engines: int) -> AsyncLLM:
        """Make the front end of some engines, 0 by default."""
        client = SimpleNamespace() if client is None else client
        front_end = AsyncLLM(client, list(engines or (0,)), Logger)
        (logger,) = front_end.logger_manager.stat_loggers
        assert logger.progress is not None
        self.progress: FrontEndProgress = logger.progress
        self.read()
        return front_end

    def answer(self, prompt_tokens: int = 0, engine: int = 0) -> None:
        """Record outputs of an engine."""
        self.progress.answered(engine, prompt_tokens)

    def read(self, seconds: float = 0.0) -> list[Progress]:
        """Return the progress after ``seconds``, with a wake each 250 ms, as the publisher has them."""
        progress = self.progress.measure(self.now)
        for _ in range(int(seconds / WAKE)):
            self.now += WAKE
            progress = self.progress.measure(self.now)
        return progress


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """Return a front end at simulated times."""
    return Timed(monkeypatch)


def test_an_engine_that_does_not_answer(timed: Timed) -> None:
    """The age counts from when requests are unfinished, with the prompts that have no answer yet."""
    front_end = timed.make()
    assert timed.read(3600.0) == [Progress(0)]

    front_end.add_request("a", 30)
    front_end.add_request("b", 5).is_prefilling = False
    (progress,) = timed.read(1.5)
    assert (progress.unfinished, progress.step_age, progress.stack) == (2, 1.5, [])
    (progress,) = timed.read(3.5)
    assert (progress.step_age, progress.step_tokens, progress.steps) == (5.0, 30, 0)
    assert (progress.waiting_age, progress.output_age, progress.blocked) == (None, None, 0)
    assert progress.stack[-1].endswith("stack_of")

    timed.answer()
    (progress,) = timed.read(1.0)
    assert (progress.step_age, progress.steps, progress.stack) == (1.0, 1, [])
    front_end.output_processor.request_states.clear()
    (progress,) = timed.read(1.0)
    assert (progress.unfinished, progress.step_age) == (0, None)


def test_the_longest_time_without_an_answer(timed: Timed) -> None:
    """The longest answer has its prompt tokens, and begins when requests are owed one."""
    front_end = timed.make()
    timed.read(60.0)
    timed.answer(99)
    timed.read(60.0)
    front_end.add_request("a")
    timed.read(3.0)
    timed.answer(30)
    found = timed.read()
    timed.now += 0.125
    timed.answer()
    timed.now += 0.25
    timed.answer(8)
    found += timed.read() + timed.read()

    assert [(3.0, 30), (0.25, 8), (0.0, 0)] == [(p.longest, p.longest_tokens) for p in found]


def test_a_session_without_input_owes_nothing(timed: Timed) -> None:
    """An idle session waits for its user; with input, for the engine."""
    front_end = timed.make()
    session = front_end.add_request("a", streaming_input=True, input_chunk_queue=None)
    timed.answer()
    assert timed.read(1.0)[0].step_age == 1.0
    (progress,) = timed.read(60.0)
    assert (progress.unfinished, progress.step_age, progress.waiting_age) == (0, None, None)

    session.input_chunk_queue = deque()
    (progress,) = timed.read(3.0)
    assert (progress.unfinished, progress.step_age) == (1, 3.0)


@pytest.mark.parametrize("has_counts", [True, False])
def test_requests_belong_to_the_engine_that_the_front_end_chose(
    timed: Timed, has_counts: bool
) -> None:
    """Each engine has ages and tokens of its own; one stack is enough for all."""
    client = SimpleNamespace(reqs_in_flight={"a": identity(5), "b": identity(5), "c": identity(7)})
    if has_counts:
        client.engine_inflight = Counter(client.reqs_in_flight.values())
    front_end = timed.make(client, 5, 6, 7)
    for name, prompt in (("a", 10), ("b", 20), ("c", 40)):
        front_end.add_request(name, prompt)
    timed.read(3.0)
    timed.answer(engine=7)
    timed.answer(engine=99)

    first, second, third = timed.read(1.0)

    assert [0, 1, 2] == [each.engine for each in (first, second, third)]
    assert (first.unfinished, first.step_age, first.step_tokens) == (2, 4.0, 30)
    assert second == Progress(1)
    assert (third.unfinished, third.step_age, third.step_tokens, third.steps) == (1, 1.0, 0, 1)
    assert first.stack
    timed.read(3.0)
    assert not timed.read()[2].stack


def test_without_a_front_end_there_is_no_progress() -> None:
    """Offline inference makes no step unless it is called, and a program may make loggers itself."""
    (offline,) = LLMEngine(SimpleNamespace(), [0], Logger).logger_manager.stat_loggers

    assert offline.progress is None
    assert Logger(SimpleNamespace(a=1), [0]).progress is None


class Loop:
    """A running event loop that a test blocks."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.free = threading.Event()

    async def _task(self) -> asyncio.Task[None]:
        return asyncio.create_task(asyncio.sleep(3600))

    def task(self) -> asyncio.Task[None]:
        """Return a task of the loop."""
        return asyncio.run_coroutine_threadsafe(self._task(), self.loop).result(10)

    def block(self) -> None:
        """Block the loop until ``free`` is set."""
        self.free.clear()
        began = threading.Event()

        def wait() -> None:
            began.set()
            self.free.wait()

        self.loop.call_soon_threadsafe(wait)
        began.wait(10)

    def run(self) -> None:
        """Wait until the loop has run what it was asked to run."""
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(10)

    def close(self) -> None:
        """Stop the loop."""

        def stop() -> None:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.call_soon(self.loop.stop)

        self.free.set()
        self.loop.call_soon_threadsafe(stop)
        self._thread.join(10)
        self.loop.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    """Return a loop that runs."""
    made = Loop()
    try:
        yield made
    finally:
        if not made.loop.is_closed():
            made.close()


class Watched:
    """A watch of a loop at simulated times."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.watch, self.now = loop, LoopWatch(), 1000.0
        self.asked = 0

    def read(self, seconds: float, *, is_blocked: bool = False) -> float | None:
        """Return how old the callback is after ``seconds`` of the publisher's wakes."""
        asked_at = None
        for _ in range(int(seconds / WAKE)):
            self.now += WAKE
            asked_at = self.watch.asked_at(self.loop.loop, self.now)
            if not is_blocked:
                self.loop.run()
        return None if asked_at is None else self.now - asked_at


def test_a_loop_that_does_not_serve_yet_may_be_blocked(loop: Loop) -> None:
    """A server that starts blocks it: the loop counts once it has run for ten seconds."""
    watched = Watched(loop)
    watched.read(CALM / 2)
    loop.block()
    assert watched.read(60.0, is_blocked=True) is None
    loop.free.set()
    watched.read(CALM - 1.0)
    loop.block()
    assert watched.read(60.0, is_blocked=True) is None
    loop.free.set()
    watched.read(CALM + 2.0)
    loop.block()
    assert watched.read(8.0, is_blocked=True) is not None


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[Heartbeats]:
    """Return an exporter's end."""
    with Heartbeats(f"ipc://{tmp_path}/ingest.ipc") as one:
        yield one


def test_the_plugin_sends_the_front_ends_progress(
    exporter: Heartbeats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records with outputs are answers; those of the core's own stats are none."""
    with importable(monkeypatch, exporter.endpoint) as ours:
        front_end = AsyncLLM(SimpleNamespace(), [0], ours.stat_logger)
        (logger,) = front_end.logger_manager.stat_loggers
        exporter.wait(lambda: bool(exporter.progress))
        assert exporter.progress[-1] == Progress(0)

        front_end.add_request("a", 30)
        front_end.logger_manager.record(30)
        front_end.logger_manager.record(None)
        exporter.wait(lambda: exporter.progress[-1].steps == 1)
        exporter.wait(lambda: (exporter.progress[-1].step_age or 0.0) >= OVERDUE)
        late = exporter.progress[-1]

        logger.record_sleep_state(1, 1)
        exporter.wait(lambda: exporter.progress[-1].condition == ASLEEP)
        logger._publisher.close()

    assert (late.unfinished, late.step_tokens, late.steps) == (1, 30, 1)
    assert any("test_front_end_progress.py" in frame for frame in late.stack)
    assert threading.current_thread() is threading.main_thread()


def test_an_answer_that_cannot_be_read_is_counted(
    exporter: Heartbeats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in a stat logger would end serving."""

    class Unreadable:
        """Outputs with a broken attribute."""

        @property
        def num_prompt_tokens(self) -> int:
            """Fail."""
            raise RuntimeError("broken on purpose")

    with importable(monkeypatch, exporter.endpoint) as ours:
        front_end = AsyncLLM(SimpleNamespace(), [0], ours.stat_logger)
        (logger,) = front_end.logger_manager.stat_loggers
        logger.record(SchedulerStats(), Unreadable(), None, 0)
        errors = logger._publisher.errors
        logger._publisher.close()

    assert errors > 0


def test_the_plugin_sends_the_age_of_a_blocked_loop(
    exporter: Heartbeats, monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    """Several times a second, with the stack; an end of the loop is no fault."""
    monkeypatch.setattr("sidestep_adapters.vllm.front_end_progress.CALM", 0.0)
    with importable(monkeypatch, exporter.endpoint) as ours:
        front_end = AsyncLLM(SimpleNamespace(), [0], ours.stat_logger)
        (logger,) = front_end.logger_manager.stat_loggers
        exporter.wait(lambda: bool(exporter.progress))
        front_end.output_handler = loop.task()
        exporter.wait(lambda: logger._progress._loop._calm_since is not None)
        loop.block()
        exporter.wait(lambda: (exporter.progress[-1].loop_age or 0.0) > OVERDUE)
        found = exporter.progress[-1]
        assert (found.unfinished, found.step_age) == (0, None)
        assert found.stack
        loop.free.set()
        exporter.wait(lambda: exporter.progress[-1].loop_age is None)
        loop.close()
        beats = len(exporter.beats)
        exporter.wait(lambda: len(exporter.beats) > beats + 1)
        assert exporter.progress[-1] == Progress(0)
        logger._publisher.close()
