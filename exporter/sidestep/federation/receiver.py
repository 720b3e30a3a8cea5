"""Frames of other exporters: who may tell of what, and what is said where that is refused."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

from sidestep.errors import WireError
from sidestep.federation.messages import Forward, decode_forward
from sidestep.federation.store import Forwarded
from sidestep.federation.twins import OVERLAP, Twins
from sidestep.protocol.messages import FromExporter
from sidestep.protocol.receiver import Receiver
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.guard import Guard

log = logging.getLogger(__name__)

MAX_ANSWERS = 256
"""That wait to be sent; each refusal is counted all the same."""

Replies = list[tuple[bytes, FromExporter]]


class Hearsay:
    """Takes what other exporters tell, and owes them an answer where they cannot be heard.

    Args:
        forwarded: What they told of.
        receiver: Words the answers.
        metrics: Where refusals are counted.
        clock: Monotonic seconds, for the log alone.
    """

    def __init__(
        self,
        forwarded: Forwarded,
        receiver: Receiver,
        metrics: SelfMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._forwarded = forwarded
        self._receiver = receiver
        self._metrics = metrics
        self._answers: deque[tuple[bytes, FromExporter]] = deque(maxlen=MAX_ANSWERS)
        self._lines = RateLimitedLog(log, clock=clock)
        self._twins = Twins()

    def take(
        self, guard: Guard, peer: bytes, frame: bytes, now: float, key: str
    ) -> Iterator[None] | None:
        """The steps in which what ``frame`` says is counted; None where it says nothing new.

        Raises:
            WireError: No exporter of ours would send that, over this connection.
        """
        try:
            guard.check(key)
            message = decode_forward(frame)
        except WireError as error:
            self._refuse(peer, error)
            raise
        self._metrics.add("sidestep_messages_total", 1, "forward")
        forwarded = self._forwarded
        known = bool(forwarded.lives.of(message.source, message.engine))
        try:
            guard.admit_source(key, message.source, message.engine, known=known)
            self._look_for_twins(message, now)
            word = forwarded.take(message, now)
        except WireError as error:
            # Of one engine, which is no reason not to hear of the others.
            self._metrics.add("sidestep_rejected_total", 1, error.reason)
            self._refuse(peer, error)
            return None
        return None if word is None else self._steps(peer, forwarded.apply(word, now))

    def pass_time(self, now: float) -> Iterator[None]:
        """Notice who has fallen silent; the steps of what waited for that, or for a second."""
        self._twins.forget(now - 2 * OVERLAP)
        self._forwarded.pass_time(now)
        return self._forwarded.catch_up(now)

    def answers(self) -> Replies:
        """What is to be said to whom, once."""
        found = list(self._answers)
        self._answers.clear()
        return found

    def _steps(self, peer: bytes, steps: Iterator[None]) -> Iterator[None]:
        try:
            yield from steps
        except WireError as error:
            self._refuse(peer, error)
            raise

    def _refuse(self, peer: bytes, error: WireError) -> None:
        self._answers.extend(self._receiver.refuse_frame(peer, error))

    def _look_for_twins(self, message: Forward, now: float) -> None:
        process = message.life, message.run
        if (message.source, message.life) == self._forwarded.own:
            return
        if self._twins.note(message.source, process, now - message.age):
            self._metrics.add("sidestep_forward_conflicts_total")
            text = "two exporters call themselves %s, and are added up: give each its own"
            self._lines.warning(message.source, f"{text} --forward.source", message.source)
