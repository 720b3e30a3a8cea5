"""Progress of vLLM's core: the tapped scheduler of an engine that hangs, over real sockets and with time as data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_vllm import Core, Request, Scheduler, config, importable
from heartbeats import Heartbeats
from sidestep.protocol.progress import OVERDUE, PAUSED, Progress
from sidestep_adapters.vllm.scheduler_events import SchedulerEvents
from sidestep_adapters.vllm.scheduler_tap import SchedulerProgress, SchedulerTap

WAKE = 0.25


class Live:
    """A tapped scheduler in its core's loop, and the exporter's end."""

    def __init__(self, exporter: Heartbeats, core: Core) -> None:
        self.exporter, self.core, self.scheduler = exporter, core, core.scheduler
        self.gate = threading.Event()

    def ask(self, name: str, prompt: int = 7) -> None:
        """Queue a request."""
        self.core.call(lambda: self.scheduler.add_request(Request(name, prompt)))

    def hang(self) -> None:
        """Wait for ``gate``."""
        while not self.gate.wait(60.0):
            pass

    @property
    def last(self) -> Progress:
        """The last progress that arrived."""
        return self.exporter.progress[-1]

    def wait(self, condition: Callable[[Progress], bool]) -> Progress:
        """Wait for progress that arrives from now on and fulfils ``condition``, and return it."""
        seen = len(self.exporter.progress)
        self.exporter.wait(lambda: any(map(condition, self.exporter.progress[seen:])))
        return next(filter(condition, self.exporter.progress[seen:]))


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """Return a tapped scheduler in its core's loop."""
    with (
        Heartbeats(f"ipc://{tmp_path}/ingest.ipc") as exporter,
        importable(monkeypatch, exporter.endpoint) as ours,
    ):
        core = Core(ours.scheduler(config()))
        one = Live(exporter, core)
        exporter.wait(lambda: bool(exporter.progress))
        yield one
        one.gate.set()
        core.close()


def names(stack: list[str], function: str) -> bool:
    """Return whether a frame is one of ``function``."""
    return any(frame.rpartition(" ")[2].rpartition(".")[2] == function for frame in stack)


def test_a_step_that_hangs_is_seen_with_its_stack(live: Live) -> None:
    """Each 250 ms, until it ends."""
    live.ask("a", 9)
    live.ask("b", 3)
    live.wait(lambda p: p.unfinished == 2)
    live.core.execute_model = live.hang
    stuck = live.wait(lambda p: (p.step_age or 0.0) >= OVERDUE)
    known = len(live.exporter.beats)
    live.exporter.wait(lambda: len(live.exporter.beats) >= known + 4)
    gaps = [b.at - a.at for a, b in pairwise(live.exporter.beats[known:])]
    live.gate.set()
    live.wait(lambda p: p.step_age is None or p.step_age < OVERDUE)

    assert (stuck.step_tokens, stuck.waiting_age) == (2, None)
    assert names(stuck.stack[-3:], "hang")
    assert names(stuck.stack[-5:], "_run_busy_loop")
    assert min(gaps) < 0.5
    assert live.wait(lambda p: p.longest >= 0.0).steps > stuck.steps


def test_a_reading_that_fails_does_not_reach_the_engine(live: Live) -> None:
    """The engine makes its steps, and nothing is claimed of it."""
    live.ask("a")
    live.wait(lambda p: p.unfinished == 1)
    live.scheduler.pause_state = "broken on purpose"
    known = live.wait(lambda p: p.unfinished == 0)
    steps = live.core.steps
    live.exporter.wait(lambda: live.core.steps > steps)
    live.scheduler.pause_state = 0
    live.wait(lambda p: p.unfinished == 1)

    assert known == Progress(0)
    assert live.exporter.beats[-1].heartbeat.errors > 0


class Timed:
    """A tap of a scheduler whose steps, and readings, a test makes at simulated times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in ("scheduler_tap", "scheduler_events"):
            monkeypatch.setattr(f"sidestep_adapters.vllm.{module}._monotonic", lambda: self.now)
        self.pushed: list[Callable[[], Any]] = []
        self.tap = SchedulerTap(self.pushed.append, pytest.fail, SchedulerEvents(pytest.fail))
        self.scheduler = Scheduler(config())
        self.progress = SchedulerProgress(self.scheduler, self.tap)
        self.read()

    def ask(self, *prompts: int, **status: str) -> None:
        """Queue requests."""
        for prompt in prompts:
            request = Request(f"r{len(self.scheduler.requests)}", prompt)
            request.status = SimpleNamespace(name=status.get("status", "WAITING"))
            self.scheduler.add_request(request)
            self.tap.queued(request)

    def schedule(self) -> Any:
        """Schedule a batch."""
        self.tap.scheduling_since = self.now
        batch = self.scheduler.schedule()
        self.tap.scheduled(batch, self.scheduler.requests, self.now)
        return batch

    def update(self, batch: Any) -> None:
        """Process the output of a batch."""
        self.tap.update_started()
        self.tap.update_finished(batch, self.scheduler.update_from_output(batch))

    def read(self, seconds: float = 0.0) -> Progress:
        """Return the progress after ``seconds``, with a wake each 250 ms, as the publisher has them.

        Its longest step is that of all wakes.
        """
        found: list[Progress] = []
        for step in range(int(seconds / WAKE) + 1):
            self.now += WAKE if step else 0.0
            while self.pushed:
                self.pushed.pop(0)()
            found += self.progress.measure(self.now)
        longest = max(found, key=lambda progress: progress.longest)
        last = found[-1]
        last.longest, last.longest_tokens = longest.longest, longest.longest_tokens
        return last


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """Return a tap at simulated times."""
    return Timed(monkeypatch)


def test_overlapping_steps_count_one_after_the_other(timed: Timed) -> None:
    """The next batch is scheduled while a long one is computed, and is not late for that."""
    timed.ask(50)
    first = timed.schedule()
    second = timed.schedule()
    progress = timed.read(10.0)
    assert (progress.step_age, progress.step_tokens) == (10.0, 50)

    timed.update(first)
    progress = timed.read(0.5)
    assert (progress.step_age, progress.step_tokens) == (0.5, 1)
    assert (progress.steps, progress.longest, progress.longest_tokens) == (1, 10.0, 50)
    timed.update(second)
    progress = timed.read()
    assert (progress.steps, progress.longest, progress.longest_tokens) == (2, 0.5, 1)
    assert (progress.step_age, progress.waiting_age) == (None, 0.0)


def test_a_call_that_schedules_is_an_open_step_once_it_is_overdue(timed: Timed) -> None:
    """An engine that admits nobody makes many short ones, and its requests wait."""
    timed.ask(5)
    timed.tap.scheduling_since = timed.now
    progress = timed.read(OVERDUE - WAKE)
    assert (progress.step_age, progress.waiting_age) == (None, OVERDUE - WAKE)

    progress = timed.read(WAKE)
    assert (progress.step_age, progress.waiting_age) == (OVERDUE, None)


def test_steps_without_output_are_late_after_twice_the_tokens(timed: Timed) -> None:
    """Until some request has output again."""
    timed.ask(4, 6)
    timed.scheduler.answers = False
    for computed in range(10, 21, 2):
        timed.update(timed.schedule())
        progress = timed.read(1.0)
        assert progress.output_age is None, computed
    timed.update(timed.schedule())
    assert timed.read(1.0).output_age == 7.0

    timed.scheduler.answers = True
    timed.update(timed.schedule())
    assert timed.read(1.0).output_age is None
    timed.scheduler.answers = False
    timed.update(timed.schedule())
    assert timed.read(5.0).output_age is None


@pytest.mark.parametrize(
    ("state", "running", "condition"), [(0, 0, ""), (1, 1, ""), (1, 0, PAUSED), (2, 1, PAUSED)]
)
def test_a_paused_scheduler_owes_nothing(
    timed: Timed, state: int, running: int, condition: str
) -> None:
    """One that only admits nobody still has to finish what it runs."""
    timed.ask(*[5] * running)
    timed.update(timed.schedule())
    timed.ask(7)
    timed.scheduler.pause_state = state

    progress = timed.read(5.0)

    assert progress.condition == condition
    assert (progress.waiting_age is None) is bool(condition)


def test_blocked_requests_are_those_that_wait_for_others(timed: Timed) -> None:
    """VLLM's names of states distinguish them."""
    for status in (
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
        "WAITING_FOR_FSM",
        "WAITING_FOR_REMOTE_KVS",
        "WAITING",
        "PREEMPTED",
    ):
        timed.ask(5, status=status)

    assert timed.read(1.0).blocked == 0
    progress = timed.read(1.0)
    assert (progress.unfinished, progress.blocked) == (5, 3)
