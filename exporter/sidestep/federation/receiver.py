"""Frames of other exporters: which keys may send what, and the answers to those that are refused."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

from sidestep.errors import WireError
from sidestep.federation.messages import Forward, decode_forward
from sidestep.federation.store import ENDED_EPOCH, Store
from sidestep.protocol.messages import FromExporter
from sidestep.protocol.receiver import Receiver
from sidestep.telemetry.logs import Limited
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.guard import Guard

log = logging.getLogger(__name__)

MAX_ANSWERS = 256
"""Refusals that wait to be sent; each is counted even if it is not sent."""

Replies = list[tuple[bytes, FromExporter]]


class RecordReceiver:
    """Hands records to the store, and queues a refusal for each that it does not take.

    Args:
        store: The store.
        receiver: Makes the refusals.
        metrics: Counts them.
        clock: Monotonic seconds, for the log alone.
    """

    def __init__(
        self, store: Store, receiver: Receiver, metrics: SelfMetrics, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._receiver = receiver
        self._metrics = metrics
        self._answers: deque[tuple[bytes, FromExporter]] = deque(maxlen=MAX_ANSWERS)
        self._lines = Limited(log, clock=clock)

    def take(
        self, guard: Guard, peer: bytes, frame: bytes, now: float, key: str
    ) -> Iterator[None] | None:
        """Return the steps that apply ``frame``; None if there is nothing to apply.

        Raises:
            WireError: No exporter sends such a frame, or this key is not authorized any more.
        """
        try:
            guard.check(key)
            message = decode_forward(frame)
        except WireError as error:
            self._refuse(peer, error)
            raise
        self._metrics.add("sidestep_messages_total", 1, "forward")
        known = self._store.find(message.source, message.engine) is not None
        try:
            guard.admit_source(key, message.source, message.engine, known=known)
            steps = self._store.take(message, now)
        except WireError as error:
            # It concerns one engine; the source may still send others.
            self._metrics.add("sidestep_rejected_total", 1, error.reason)
            self._refuse(peer, error)
            self._note_conflict(message, error)
            return None
        return None if steps is None else self._guarded(peer, steps)

    def answers(self) -> Replies:
        """Return the refusals that have not been sent."""
        found = list(self._answers)
        self._answers.clear()
        return found

    def _guarded(self, peer: bytes, steps: Iterator[None]) -> Iterator[None]:
        try:
            yield from steps
        except WireError as error:
            self._refuse(peer, error)
            raise

    def _refuse(self, peer: bytes, error: WireError) -> None:
        self._answers.extend(self._receiver.refuse_frame(peer, error))

    def _note_conflict(self, message: Forward, error: WireError) -> None:
        if error.reason != ENDED_EPOCH:
            return
        self._metrics.add("sidestep_forward_conflicts_total")
        text = "two processes use --forward.source %s: give each its own; if there is only one, its"
        hint = "clock was set back: correct it and restart the process"
        self._lines.warning(message.source, f"{text} {hint}", message.source)
