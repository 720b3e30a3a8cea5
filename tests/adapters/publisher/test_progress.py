"""Progress as a process measures it, and how a publisher sends it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sidestep.protocol.progress import MAX_FRAMES, OVERDUE, Progress
from sidestep_adapters.publisher.progress import (
    LATE,
    MAX_FRAME_CHARS,
    ProgressMeter,
    Reading,
    stack_of,
)

START = 1000.0
WAKE = 0.25


def ages(progress: Progress) -> tuple[float | None, float | None, float | None]:
    """Return all ages of ``progress``."""
    return progress.step_age, progress.waiting_age, progress.output_age


class Meter:
    """A meter whose publisher wakes every 250 ms of a simulated time."""

    def __init__(self, thread: int | None = None) -> None:
        self.now, self.computed = START, 0.0
        self.meter = ProgressMeter(0, thread, lambda: self.computed)
        self.meter.measure(Reading(), START)

    def after(self, seconds: float, **reading: Any) -> Progress:
        """Return the progress after ``seconds`` in which the process read the same at each wake."""
        progress = self.meter.measure(Reading(**reading), self.now)
        for _ in range(int(seconds / WAKE)):
            self.now += WAKE
            progress = self.meter.measure(Reading(**reading), self.now)
        return progress


def test_a_step_that_ended_after_the_clock_was_read_is_no_negative_age() -> None:
    """The exporter would refuse the heartbeat."""
    later = START + 1.0

    assert ages(Meter().after(0.0, unfinished=1, ended_at=later)) == (None, 0.0, None)
    assert ages(Meter().after(0.0, unfinished=1, opened_at=later)) == (0.0, None, None)


@pytest.mark.parametrize(
    ("pause", "computed", "is_blamed"),
    [(LATE - 0.1, 0.0, True), (LATE + 0.1, 0.0, False), (20.0, 9.9, False), (20.0, 10.1, True)],
)
def test_a_process_that_was_stopped_is_not_to_blame(
    pause: float, computed: float, is_blamed: bool
) -> None:
    """All ages end with the pause, unless the process has computed and kept the publisher waiting."""
    meter = Meter()
    open_step = {"unfinished": 1, "opened_at": START, "output_at": START, "computed": 9}
    meter.after(5.0, **open_step)
    meter.now += pause
    meter.computed += computed

    progress = meter.after(1.0, **open_step)

    expected = 6.0 + pause if is_blamed else 1.0
    assert progress.step_age == pytest.approx(expected)
    assert (progress.output_age is not None) is is_blamed


def test_blocked_requests_are_counted_while_they_wait_long() -> None:
    """When the last one no longer is, requests wait from then on."""
    calls = []

    def blocked() -> int:
        calls.append(1)
        return 2

    meter = Meter()
    meter.after(OVERDUE - WAKE, unfinished=2, blocked=blocked)
    assert not calls

    progress = meter.after(60.0, unfinished=2, blocked=blocked)
    assert (progress.blocked, progress.waiting_age) == (2, 60.0 + OVERDUE - WAKE)
    progress = meter.after(3.0, unfinished=3, blocked=blocked)
    assert (progress.blocked, progress.waiting_age) == (2, 3.0)


class Hanging:
    """A thread that hangs in ``step`` until it is released."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self._thread = threading.Thread(target=self.step)
        self._thread.start()
        self.ident = self._thread.ident

    def step(self) -> None:
        """Wait for ``release``."""
        self.wait_for_the_worker()

    def wait_for_the_worker(self, secret: str = "secret") -> None:
        """Wait, with a value in the frame."""
        while secret and not self.release.wait(60.0):
            pass

    def end(self) -> None:
        """End the thread."""
        self.release.set()
        self._thread.join()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    """Return a thread that hangs."""
    thread = Hanging()
    yield thread
    thread.end()


def named(stack: list[str], function: str) -> bool:
    """Return whether a frame is one of ``function``, or of a method of that name."""
    return any(frame.rpartition(" ")[2].rpartition(".")[2] == function for frame in stack)


def test_a_stack_names_files_lines_and_functions_only(hanging: Hanging) -> None:
    """The innermost frame comes last; paths are short and values are absent."""
    assert hanging.ident is not None
    stack = stack_of(hanging.ident)

    order = [
        next(number for number, frame in enumerate(stack) if named([frame], function))
        for function in ("step", "wait_for_the_worker", "wait")
    ]
    assert order == sorted(order)
    assert order[0] > 0
    own = stack[order[1]]
    assert own.startswith("adapters/publisher/test_progress.py:")
    assert "secret" not in " ".join(stack)
    assert stack_of(0) == []


def test_a_stack_is_bounded() -> None:
    """The innermost frames of a deep recursion remain, with names cut and printable."""
    found: list[list[str]] = []
    code = compile(
        "def r(n, f):\n if n: r(n - 1, f)\n else: f()",
        "/x/lib/python3/site-packages/vllm/" + "\x1b" + "n" * 300,
        "exec",
    )
    names: dict[str, Any] = {}
    exec(code, names)

    names["r"](100, lambda: found.append(stack_of(threading.get_ident())))

    (stack,) = found
    assert len(stack) == MAX_FRAMES
    assert named(stack[-1:], "stack_of")
    deep = [frame for frame in stack if frame.startswith("vllm/?nnn")]
    assert len(deep) > MAX_FRAMES // 2
    assert {len(frame) for frame in deep} == {MAX_FRAME_CHARS}


@pytest.mark.parametrize(("value", "has_stack"), [("off", False), ("on", True), ("", True)])
def test_stacks_can_be_turned_off(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch, value: str, has_stack: bool
) -> None:
    """By the engine's environment."""
    monkeypatch.setenv("SIDESTEP_STACKS", value)

    assert bool(Meter(hanging.ident).after(5.0, unfinished=1).stack) is has_stack
    assert not Meter(None).after(5.0, unfinished=1).stack
