"""States and reasons of an engine's health, and thresholds, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from sidestep.protocol.messages import CORE, FRONT_END
from sidestep.protocol.progress import ASLEEP, PAUSED, STARTING, Progress
from sidestep.tracking.health.machine import HealthTracker, Presence, Process, Thresholds

STACK = ["vllm/v1/engine/core.py:step"]


class Engine:
    """Processes of one engine, and its tracker; time is data."""

    def __init__(self) -> None:
        self.limits = Thresholds()
        self.tracker = HealthTracker()
        self.processes: dict[str, Process] = {}
        self.steps = 0

    def hear(self, now: float, name: str = "core", role: str = CORE) -> Process:
        """Receive a message without progress."""
        self.processes[name] = Process(name, role, now)
        return self.processes[name]

    def beat(self, now: float, name: str = "core", role: str = CORE, **fields: Any) -> None:
        """Receive a heartbeat with progress."""
        fields.setdefault("steps", self.steps)
        process = self.hear(now, name, role)
        self.tracker.report(process, Progress(0, **fields), self.limits, now)

    def run(self, since: float, until: float, seconds: float = 0.05, tokens: int = 1) -> None:
        """Receive a heartbeat each second in which steps of so many seconds and tokens ended."""
        now = since
        while now < until:
            self.steps += 10
            self.beat(now, unfinished=1, longest=seconds, longest_tokens=tokens)
            now += 1.0

    def health(self, now: float, presence: str = "CONNECTED", item_at: float | None = None) -> Any:
        """Return the engine's health."""
        present = Presence[presence]
        processes = list(self.processes.values())
        return self.tracker.health(present, processes, self.limits, item_at, now)

    def expect(self, expected: str, now: float, **more: Any) -> Any:
        """Check that the state at ``now``, and the reason if there is one, are as expected."""
        health = self.health(now, **more)
        found = health.state.value + (f" {health.reason.value}" if health.reason else "")
        assert found == expected, f"{found} at {now}, expected {expected}: {health}"
        return health


@pytest.fixture
def engine() -> Engine:
    """Return an engine of which nothing is known."""
    return Engine()


def test_items_alone(engine: Engine) -> None:
    """A stream without progress claims nothing beyond its items, and is never stalled."""
    engine.hear(0)
    engine.expect("starting", 1)
    engine.expect("ok", 10, item_at=1.0)
    engine.expect("idle", 1000, item_at=1.0)


def test_starting_and_idle(engine: Engine) -> None:
    """A process says that it starts up; then it is idle, busy with requests, and idle again."""
    engine.beat(0, condition=STARTING)
    engine.expect("starting", 1)
    engine.beat(2)
    engine.expect("idle", 2)
    engine.run(3, 5)
    assert engine.expect("ok", 5).unfinished == 1
    engine.beat(5)
    engine.expect("ok", 6)
    engine.beat(16)
    engine.expect("idle", 16)


def test_queued_without_steps(engine: Engine) -> None:
    """An engine that has requests is not idle, even if no step has ended for long."""
    engine.beat(0)
    engine.beat(100, unfinished=2, waiting_age=1.0)
    engine.expect("ok", 100)


def test_step_without_requests(engine: Engine) -> None:
    """A step of an engine that owes nothing, such as a dummy step of an idle rank, is no stall."""
    engine.beat(0, step_age=60.0)
    engine.expect("idle", 0)


def test_first_step_compiles(engine: Engine) -> None:
    """The first step may compile for 12 s, and longer with more tokens."""
    engine.beat(12, unfinished=1, step_age=11.9, step_tokens=1)
    engine.expect("slow step", 12)
    engine.beat(13, unfinished=1, step_age=12.9, step_tokens=1)
    engine.expect("stalled step", 13)
    engine.beat(30, unfinished=1, step_age=29.9, step_tokens=1000)
    engine.expect("slow step", 30)


def test_new_process_compiles(engine: Engine) -> None:
    """Steps of a process that has replaced another are new again."""
    engine.run(0, 60)
    engine.beat(70, unfinished=1, steps=0, step_age=10.0, step_tokens=1)
    engine.expect("slow step", 70)


def test_compiled_step_is_forgotten(engine: Engine) -> None:
    """One step that compiled does not raise the threshold of later ones."""
    engine.run(0, 1, seconds=11.0)
    engine.run(1, 30)
    engine.beat(38, unfinished=1, step_age=7.6, step_tokens=1)
    engine.expect("stalled step", 38)


def test_slow_steps_are_learnt(engine: Engine) -> None:
    """Steps that take 3 s are no stall until 17 s."""
    engine.run(0, 30, seconds=3.0)
    engine.beat(46, unfinished=1, step_age=16.0, step_tokens=1)
    engine.expect("slow step", 46)
    engine.beat(48, unfinished=1, step_age=18.0, step_tokens=1)
    engine.expect("stalled step", 48)


def test_stalled_steps_are_not_learnt(engine: Engine) -> None:
    """However often steps stall among others that do not, the threshold stays."""
    engine.run(0, 20)
    for since in range(30, 300, 30):
        engine.run(since, since + 4)
        engine.run(since + 20, since + 21, seconds=10.0)
    engine.beat(308, unfinished=1, step_age=7.6, step_tokens=1)
    engine.expect("stalled step", 308)


def test_steps_that_all_stall_are_learnt(engine: Engine) -> None:
    """An engine whose steps are all overdue is slow, but each counts up to the threshold it had."""
    engine.run(0, 2, seconds=300.0)
    engine.beat(60, unfinished=1, step_age=58.0, step_tokens=1)
    engine.expect("slow step", 60)
    engine.beat(64, unfinished=1, step_age=62.0, step_tokens=1)
    engine.expect("stalled step", 64)


def test_first_long_prefill(engine: Engine) -> None:
    """A prompt larger than any step so far gets seconds per token."""
    engine.run(0, 60)
    engine.beat(100, unfinished=1, step_age=40.0, step_tokens=4096)
    engine.expect("ok", 100)
    engine.beat(150, unfinished=1, step_age=90.0, step_tokens=4096)
    engine.expect("stalled step", 150)


def test_first_prefill_of_slow_engine(engine: Engine) -> None:
    """The allowance per token follows from slow small steps."""
    engine.run(0, 60, seconds=0.5, tokens=2)
    engine.beat(120, unfinished=1, step_age=60.0, step_tokens=900)
    engine.expect("slow step", 120)


def test_size_between_known_ones(engine: Engine) -> None:
    """A step between known sizes takes at most what the larger takes, and its share of it at least."""
    engine.run(0, 20)
    engine.run(20, 40, seconds=0.4, tokens=8000)
    engine.beat(50, unfinished=1, step_age=7.7, step_tokens=3000)
    engine.expect("stalled step", 50)
    engine.run(50, 60, seconds=18.0, tokens=1000)
    engine.beat(100, unfinished=1, step_age=20.0, step_tokens=147)
    engine.expect("slow step", 100)


def test_most_threshold(engine: Engine) -> None:
    """No step may take longer than the most."""
    engine.run(0, 30, seconds=100.0, tokens=10000)
    engine.beat(200, unfinished=1, step_age=121.0, step_tokens=10000)
    engine.expect("stalled step", 200)


def test_blocked_requests(engine: Engine) -> None:
    """Requests that all wait for a grammar or a transfer are a stall only after the most seconds."""
    engine.beat(60, unfinished=2, blocked=2, waiting_age=50.0)
    engine.expect("ok", 60)
    engine.beat(60, unfinished=2, blocked=1, waiting_age=50.0)
    engine.expect("stalled no_steps", 60)
    engine.beat(131, unfinished=2, blocked=2, waiting_age=121.0)
    engine.expect("stalled no_steps", 131)
    engine.beat(132, unfinished=0, blocked=0, waiting_age=500.0)
    engine.expect("idle", 132)


def test_no_output(engine: Engine) -> None:
    """Steps end and nobody gets output; slow steps may be several."""
    engine.run(0, 60)
    engine.steps += 100
    engine.beat(68, unfinished=2, output_age=8.0)
    engine.expect("stalled no_output", 68)
    engine.run(70, 90, seconds=4.0)
    engine.beat(98, unfinished=2, output_age=20.0)
    engine.expect("slow no_output", 98)


def test_silence_on_purpose(engine: Engine) -> None:
    """Start-up and sleep may hold Python's lock for long."""
    for condition, state in ((STARTING, "starting"), (ASLEEP, "asleep"), (PAUSED, "asleep")):
        engine.beat(0, condition=condition)
        engine.expect(state, 50)
        engine.expect("stalled publisher", 121)


def test_requests_during_a_pause(engine: Engine) -> None:
    """Requests that arrived during a pause wait for a step from its end only."""
    engine.beat(0, condition=PAUSED, unfinished=1, waiting_age=50.0)
    engine.beat(1, unfinished=1, waiting_age=51.0)
    engine.expect("ok", 1)
    engine.beat(9, unfinished=1, waiting_age=59.0)
    engine.expect("stalled no_steps", 9)


def test_woken_by_another(engine: Engine) -> None:
    """A front end that has not received the wake-up does not hide a stall."""
    engine.beat(0, "front", FRONT_END, condition=ASLEEP)
    engine.beat(0)
    engine.expect("asleep", 0)
    engine.run(1, 60)
    for now in (58, 70):
        engine.beat(now, "front", FRONT_END, condition=ASLEEP)
    engine.beat(70, unfinished=1, step_age=10.0, step_tokens=1)
    engine.expect("stalled step", 70)


def test_asleep_after_steps(engine: Engine) -> None:
    """A step whose heartbeat arrives after the sleep began does not wake the engine up."""
    engine.run(0, 9)
    engine.beat(9.5, "front", FRONT_END, condition=ASLEEP)
    engine.steps += 1
    engine.beat(10)
    engine.expect("asleep", 10)


def test_queue_of_busy_core(engine: Engine) -> None:
    """A front end that waits while the core works for others, and just after, is in no doubt."""
    engine.run(0, 60)
    engine.beat(60, "front", FRONT_END, unfinished=1, step_age=50.0)
    engine.expect("ok", 60)
    engine.beat(60.5)
    engine.expect("ok", 61)


def test_front_ends_alone(engine: Engine) -> None:
    """Without a core, a front end that got no answer for longer than ever is stalled."""
    engine.beat(1, "a", FRONT_END, unfinished=1, step_age=0.5, steps=1)
    engine.beat(20, "a", FRONT_END, unfinished=1, step_age=13.0, step_tokens=20, steps=1)
    engine.expect("stalled queue", 20)
    engine.beat(20, "a", FRONT_END, unfinished=1, step_age=13.0, step_tokens=2000, steps=1)
    engine.expect("ok", 20)


def test_front_ends_share_a_queue(engine: Engine) -> None:
    """One front end waits while another gets answers."""
    for now in range(30):
        engine.beat(now, "a", FRONT_END, unfinished=1, step_age=float(now), steps=1)
        engine.beat(now, "b", FRONT_END, unfinished=1, step_age=0.1, steps=now)
    engine.expect("ok", 29)


def test_loop_of_an_idle_front_end(engine: Engine) -> None:
    """Without requests, too: the next client would wait. A loop that puts the engine to sleep may take longer."""
    engine.beat(9)
    engine.beat(9, "front", FRONT_END, loop_age=8.0)
    engine.expect("stalled front_end", 9)
    for now in (10, 110, 132):
        engine.beat(now)
        engine.beat(now, "front", FRONT_END, loop_age=now - 10.0, condition=ASLEEP)
        expected = {10: "asleep", 110: "slow front_end", 132: "stalled front_end"}[now]
        engine.expect(expected, now)


def test_compilation(engine: Engine) -> None:
    """A step that compiles, minutes after the first ones, is a stall only after the most seconds."""
    engine.run(0, 60)
    compiling = ["torch/_inductor/async_compile.py:9 wait", "concurrent/futures/_base.py:9 result"]
    engine.beat(85, unfinished=1, step_age=25.0, step_tokens=1, stack=compiling)
    engine.expect("ok", 85)
    engine.beat(181, unfinished=1, step_age=121.0, step_tokens=1, stack=compiling)
    engine.expect("stalled step", 181)


def test_compiled_code_that_hangs(engine: Engine) -> None:
    """It has frames of the compiler's package as well."""
    engine.run(0, 60)
    frames = ["torch/_dynamo/eval_frame.py:9 f", "torch/_inductor/output_code.py:9 f", *STACK]
    engine.beat(70, unfinished=1, step_age=10.0, step_tokens=1, stack=frames)
    engine.expect("stalled step", 70)


def test_roles(engine: Engine) -> None:
    """A process without a role waits for answers, whether a core is there or not."""
    engine.beat(0, "own", "", unfinished=1, step_age=13.0)
    engine.expect("stalled queue", 0)
    engine.beat(0)
    assert engine.expect("ok", 0).unfinished == 1
    engine.beat(0, "own", "")
    assert engine.expect("idle", 0).unfinished == 0


def test_replaced_process(engine: Engine) -> None:
    """A process that talks and no longer reports progress is not judged by what it reported."""
    engine.beat(0, unfinished=1, waiting_age=50.0)
    engine.expect("stalled no_steps", 0)
    engine.hear(10)
    engine.expect("ok", 10, item_at=9.0)
    engine.processes.clear()
    engine.hear(11, "other")
    engine.beat(11, "other")
    engine.expect("idle", 11)


def test_reason_stays(engine: Engine) -> None:
    """A stall keeps its reason while it lasts, and its end is an end."""
    engine.beat(0, unfinished=1, waiting_age=8.0)
    engine.expect("stalled no_steps", 0)
    engine.beat(1, unfinished=1, waiting_age=9.0, output_age=60.0)
    engine.expect("stalled no_steps", 1)
    engine.expect("stopped", 2, presence="CLOSED")
    engine.beat(3, unfinished=1, waiting_age=9.0, output_age=60.0)
    engine.expect("stalled no_output", 3)
    engine.beat(4, unfinished=1, waiting_age=9.0)
    engine.expect("stalled no_steps", 4)


def test_own_thresholds(engine: Engine) -> None:
    """The least threshold raises all, up to the most."""
    engine.limits = Thresholds(least=20.0, most=25.0)
    engine.run(0, 60)
    engine.beat(80, unfinished=1, waiting_age=24.0)
    engine.expect("slow no_steps", 80)
    engine.beat(82, unfinished=1, waiting_age=26.0)
    engine.expect("stalled no_steps", 82)
    engine.beat(83)
    engine.expect("slow publisher", 83 + 24)
    engine.expect("stalled publisher", 83 + 26)
