"""Progress of engines as vLLM's front end sees it: answers, and requests that wait for one.

Needs no vLLM itself.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from threading import get_ident
from types import FrameType
from typing import Any

from sidestep.protocol.progress import ASLEEP, OVERDUE, Progress
from sidestep_adapters.publisher.progress import ProgressMeter, Reading

log = logging.getLogger(__name__)

PERIOD = 1.0
"""Least seconds between two callbacks; each wakes an idle loop."""
LATE = 1.0
"""Seconds that a callback takes on a loop that does not serve yet."""
CALM = 10.0
"""Seconds without a late callback after which the loop serves: starting a server blocks it."""
_monotonic = time.monotonic


class FrontEndProgress:
    """Reader of a front end's progress.

    Args:
        front_end: An ``AsyncLLM``; a weak reference is kept.
        engines: vLLM's indexes of the engines, in the order of the stream's Hello.
    """

    def __init__(self, front_end: Any, engines: Sequence[int]) -> None:
        self._front_end = weakref.ref(front_end)
        self._is_asleep = False
        self._loop = LoopWatch()
        # A stack is that of the serving thread: with several engines the first one has it.
        self._engines = {
            number: _Engine(index, None if index else get_ident())
            for index, number in enumerate(engines)
        }

    def answered(self, number: int, prompt_tokens: int) -> None:
        """Count outputs that the engine ``number`` sent, with tokens of prompts; on the serving thread."""
        engine = self._engines.get(number)
        if engine is not None:
            engine.answered(prompt_tokens)

    def slept(self, sleep: int) -> None:
        """Record that the engines fell asleep or woke up."""
        self._is_asleep = bool(sleep)

    def measure(self, now: float) -> list[Progress]:
        """Return the progress of the engines at ``now``, in the publisher thread."""
        front_end = self._front_end()
        if front_end is None:
            return [engine.measure(Reading(), now) for engine in self._engines.values()]
        requests = _Requests(front_end)
        if not requests.has_engines and len(self._engines) > 1:
            return []
        condition = ASLEEP if self._is_asleep else ""
        # The task that receives the engines' outputs, once there is one.
        get_loop = getattr(getattr(front_end, "output_handler", None), "get_loop", lambda: None)
        asked_at = self._loop.asked_at(get_loop(), now)
        return [
            engine.measure(engine.read(requests, number, condition, asked_at, now), now)
            for number, engine in self._engines.items()
        ]


class _Engine:
    """One engine's answers, which the serving thread counts and the publisher thread reads."""

    def __init__(self, index: int, thread: int | None) -> None:
        self._meter = ProgressMeter(index, thread)
        self.measure = self._meter.measure
        self._answers = 0
        self._answered_at = _monotonic()
        self._longest, self._longest_tokens = 0.0, 0

    def answered(self, prompt_tokens: int) -> None:
        """Count an answer, with the tokens of the prompts that it is the first answer to."""
        now = _monotonic()
        # Requests that came after the last wake have waited since then at most.
        owed_since = self._meter.owed_since
        since = self._meter.woken_at if owed_since is None else owed_since
        seconds = now - max(self._answered_at, since)
        # First answers are few, but only they show how long prompts take: they win over others.
        if (prompt_tokens > 0, seconds) > (self._longest_tokens > 0, self._longest):
            self._longest, self._longest_tokens = seconds, prompt_tokens
        self._answered_at = now
        self._answers += 1

    def read(
        self,
        requests: _Requests,
        number: int,
        condition: str,
        loop_asked_at: float | None,
        now: float,
    ) -> Reading:
        unfinished, tokens = requests.count(number), 0
        if unfinished and now - self._answered_at >= OVERDUE:
            unfinished, tokens = requests.owed(number)
        # An answer that comes between these lines is not counted; the next one is.
        longest, longest_tokens = self._longest, self._longest_tokens
        self._longest, self._longest_tokens = 0.0, 0
        return Reading(
            unfinished,
            self._answers,
            self._answered_at if unfinished else None,
            tokens,
            longest=longest,
            longest_tokens=longest_tokens,
            condition=condition,
            loop_asked_at=loop_asked_at,
        )


class _Requests:
    """The unfinished requests of a front end.

    Attributes:
        has_engines: Whether the front end knows each request's engine: it does if it chooses it.
    """

    def __init__(self, front_end: Any) -> None:
        self._states: dict[str, Any] = front_end.output_processor.request_states
        client = front_end.engine_core
        self._engines: dict[str, bytes] = getattr(client, "reqs_in_flight", {})
        self.has_engines = hasattr(client, "reqs_in_flight")
        # Releases before 0.32 do not keep the counts.
        counts = getattr(client, "engine_inflight", None)
        self._counts = Counter(list(self._engines.values())) if counts is None else counts

    def count(self, number: int) -> int:
        """Return the number of unfinished requests of the engine ``number``."""
        return self._counts[_identity(number)] if self.has_engines else len(self._states)

    def owed(self, number: int) -> tuple[int, int]:
        """Return how many of an engine's requests wait for it, and the tokens of unanswered prompts."""
        waiting = [
            state
            for request_id, state in list(self._states.items())
            if not self.has_engines or self._engines.get(request_id) == _identity(number)
            # A session may have answered all of its input so far.
            if not getattr(state, "streaming_input", False) or state.input_chunk_queue is not None
        ]
        return len(waiting), sum(state.prompt_len for state in waiting if state.is_prefilling)


def _identity(number: int) -> bytes:
    """Return an engine's identity on vLLM's sockets."""
    return number.to_bytes(2, "little")


class LoopWatch:
    """Check that an event loop runs callbacks, from the publisher thread, about once a second."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked_at: float | None = None
        self._next = 0.0
        self._calm_since: float | None = None

    def asked_at(self, loop: asyncio.AbstractEventLoop | None, now: float) -> float | None:
        """Return when ``loop`` was asked to run a callback that it has not run yet; else None.

        None, too, for a loop that is not running, or is still starting its server.
        """
        if loop is not self._loop or loop is None or not loop.is_running():
            self._loop, self._asked_at, self._calm_since = loop, None, None
            return None
        asked_at = self._asked_at
        if asked_at is None:
            self._calm_since = now if self._calm_since is None else self._calm_since
            self._ask(loop, now)
            return None
        if self._calm_since is not None and asked_at - self._calm_since >= CALM:
            return asked_at
        if now - asked_at >= LATE:
            self._calm_since = None
        return None

    def _ask(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        if now < self._next:
            return
        self._next = now + PERIOD
        self._asked_at = now
        try:
            loop.call_soon_threadsafe(self._ran)
        except RuntimeError:
            # It was closed just now.
            self._asked_at = None

    def _ran(self) -> None:
        self._asked_at = None


def calling_front_end() -> Any:
    """Return the ``AsyncLLM`` that is making a stat logger; None if there is none.

    vLLM gives a stat logger no reference to it, so it is found among the callers. Offline inference
    does not count: its engine makes no step unless it is called.
    """
    frame: FrameType | None = sys._getframe(1)
    try:
        while frame is not None:
            owner = frame.f_locals.get("self")
            if hasattr(owner, "output_processor") and not hasattr(owner, "step"):
                return owner
            frame = frame.f_back
    except Exception:
        log.exception("sidestep: the front end was not found; its progress is not reported")
    return None
