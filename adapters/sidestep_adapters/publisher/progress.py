"""Progress of engines, measured in their process, with the stack of a thread that makes none."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from sidestep.protocol.limits import printable
from sidestep.protocol.progress import MAX_FRAMES, OVERDUE, Progress, is_overdue
from sidestep_adapters.publisher.environment import choice
from sidestep_adapters.publisher.translate import bounded_count

LATE = 2.5
"""Seconds between two wakes of the publisher, normally 0.25 at most, that show that the process was
stopped or starved, unless it computed for half of them."""
STACK_INTERVAL = 5.0
"""Seconds between two samples of a stack."""
MAX_FRAME_CHARS = 200

_PACKAGE = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")


class Reading(NamedTuple):
    """Values that a process reads of one engine at a wake of the publisher; times are monotonic.

    Attributes that are not listed are those of ``Progress``.

    Attributes:
        opened_at: When the oldest open step began; None: no step is open.
        ended_at: When the last step ended; 0: none has.
        output_at: When requests last got output; None: the process does not know.
        computed: Tokens computed since then.
        blocked: Counts blocked requests. Called only while progress is overdue, like the next one.
        request_tokens: Counts the tokens of all unfinished requests.
        loop_asked_at: When the event loop was given a callback that it has not run; None: it has.
    """

    unfinished: int = 0
    steps: int = 0
    opened_at: float | None = None
    step_tokens: int = 0
    ended_at: float = 0.0
    output_at: float | None = None
    computed: int = 0
    longest: float = 0.0
    longest_tokens: int = 0
    condition: str = ""
    blocked: Callable[[], int] = int
    request_tokens: Callable[[], int] = int
    loop_asked_at: float | None = None


class ProgressMeter:
    """Measures the progress of one engine at each wake of the publisher, in its thread.

    After the process was stopped or starved, ages count from the next wake on. A thread that computes
    without an end delays the publisher, too, but does not restart the ages.

    Args:
        thread: Ident of the thread that runs the engine's steps; None: unknown so far, no stack.
        processor_time: Returns the seconds for which all threads of the process have computed.

    Attributes:
        owed_since: Time of the wake since which requests have been unfinished; None: none are, or
            the engine makes no progress on purpose.
    """

    def __init__(
        self,
        engine: int = 0,
        thread: int | None = None,
        processor_time: Callable[[], float] = time.process_time,
    ) -> None:
        self.thread = thread
        self.owed_since: float | None = None
        self._engine = engine
        self.woken_at = self._earliest = self._blocked_until = -math.inf
        self._processor_time = processor_time
        self._computed = 0.0
        self._stack: list[str] = []
        self._sampled_at = -math.inf
        self._has_stacks = choice("SIDESTEP_STACKS", ("on", "off")) == "on"

    def measure(self, reading: Reading, now: float) -> Progress:
        """Return the progress at ``now``."""
        pause, computed = now - self.woken_at, self._processor_time()
        if pause > LATE and computed - self._computed < pause / 2:
            self._earliest = now
        self.woken_at, self._computed = now, computed
        if reading.unfinished <= 0 or reading.condition:
            self.owed_since = None
        elif self.owed_since is None:
            self.owed_since = now
        progress = Progress(
            self._engine,
            reading.steps,
            bounded_count(reading.unfinished),
            longest=reading.longest,
            longest_tokens=bounded_count(reading.longest_tokens),
            condition=reading.condition,
        )
        if not reading.condition:
            self._add_ages(progress, reading, now)
        if reading.loop_asked_at is not None:
            progress.loop_age = _age(max(self._earliest, reading.loop_asked_at), now)
        progress.stack = self._sample(now, is_wanted=is_overdue(progress))
        return progress

    def _add_ages(self, progress: Progress, reading: Reading, now: float) -> None:
        earliest = max(self._earliest, self.owed_since or self._earliest)
        since = max(earliest, reading.ended_at)
        if reading.opened_at is not None:
            progress.step_age = _age(max(since, reading.opened_at), now)
            progress.step_tokens = bounded_count(reading.step_tokens)
        elif reading.unfinished > 0:
            progress.waiting_age = _age(since, now)
            if progress.waiting_age >= OVERDUE:
                progress.blocked = reading.blocked()
                if progress.blocked >= reading.unfinished:
                    self._blocked_until = now
                else:
                    # Until a moment ago the engine had nothing that it could have computed.
                    progress.waiting_age = _age(max(since, self._blocked_until), now)
        if reading.unfinished > 0 and reading.output_at is not None:
            silent = _age(max(earliest, reading.output_at), now)
            if silent >= OVERDUE and reading.computed > 2 * reading.request_tokens():
                progress.output_age = silent

    def _sample(self, now: float, *, is_wanted: bool) -> list[str]:
        """Return the stack of the thread, at most ``STACK_INTERVAL`` old; empty if it is not wanted."""
        if not is_wanted or self.thread is None or not self._has_stacks:
            self._stack, self._sampled_at = [], -math.inf
        elif now - self._sampled_at >= STACK_INTERVAL:
            self._stack, self._sampled_at = stack_of(self.thread), now
        return self._stack


def stack_of(thread: int) -> list[str]:
    """Return the innermost frames of a thread, the innermost last: no source text and no values."""
    frame = sys._current_frames().get(thread)
    frames: list[str] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        frames.append(_text(frame))
        frame = frame.f_back
    return frames[::-1]


def _text(frame: FrameType) -> str:
    """Return ``file:line function``; the file from its package, or the last three parts of its path."""
    code = frame.f_code
    file, found = _PACKAGE.subn("", code.co_filename)
    if not found:
        file = "/".join(re.split(r"[/\\]", file)[-3:])
    # Releases before 3.11 have the plain name only.
    function = getattr(code, "co_qualname", code.co_name)
    return printable(f"{file}:{frame.f_lineno or 0} {function}")[:MAX_FRAME_CHARS]


def _age(since: float, now: float) -> float:
    # A step may have ended after ``now`` was read.
    return max(0.0, now - since)
