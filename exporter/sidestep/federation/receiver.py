"""Receiver of frames from other exporters: authorization, and replies to rejected records."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

from sidestep.errors import WireError
from sidestep.federation.messages import Forward, decode_forward
from sidestep.federation.store import ENDED_EPOCH, Store
from sidestep.protocol.messages import FromExporter
from sidestep.protocol.receiver import Receiver
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.guard import PeerGuard

log = logging.getLogger(__name__)

MAX_REJECTIONS = 256
"""Maximum queued rejections; each is counted even if it is not sent."""

Replies = list[tuple[bytes, FromExporter]]


class RecordReceiver:
    """Receiver that passes records to the store and queues a reply for each rejected one.

    Args:
        store: Store of the records.
        receiver: Session receiver, which creates the rejections.
        metrics: Self-metrics that count rejections.
        clock: Monotonic seconds, for the log only.
    """

    def __init__(
        self, store: Store, receiver: Receiver, metrics: SelfMetrics, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._receiver = receiver
        self._metrics = metrics
        self._rejections: deque[tuple[bytes, FromExporter]] = deque(maxlen=MAX_REJECTIONS)
        self._lines = RateLimitedLog(log, clock=clock)

    def accept(
        self, guard: PeerGuard, peer: bytes, frame: bytes, now: float, key: str
    ) -> Iterator[None] | None:
        """Return the steps that apply ``frame``; None if there is nothing to apply.

        Raises:
            WireError: The frame is invalid, or its key is no longer authorized.
        """
        try:
            guard.check(key)
            message = decode_forward(frame)
        except WireError as error:
            self._reject(peer, error)
            raise
        self._metrics.add("sidestep_messages_total", 1, "forward")
        known = self._store.find(message.source, message.engine) is not None
        try:
            guard.admit_source(key, message.source, message.engine, known=known)
            steps = self._store.accept(message, now)
        except WireError as error:
            # Only this engine is rejected; the source may send others.
            self._metrics.add("sidestep_rejected_total", 1, error.reason)
            self._reject(peer, error)
            self._report_conflict(message, error)
            return None
        return None if steps is None else self._run(peer, steps)

    def rejections(self) -> Replies:
        """Return and clear the queued rejections."""
        found = list(self._rejections)
        self._rejections.clear()
        return found

    def _run(self, peer: bytes, steps: Iterator[None]) -> Iterator[None]:
        """Yield from ``steps``, and queue a rejection if they fail."""
        try:
            yield from steps
        except WireError as error:
            self._reject(peer, error)
            raise

    def _reject(self, peer: bytes, error: WireError) -> None:
        self._rejections.extend(self._receiver.refuse_frame(peer, error))

    def _report_conflict(self, message: Forward, error: WireError) -> None:
        if error.reason != ENDED_EPOCH:
            return
        self._metrics.add("sidestep_forward_conflicts_total")
        text = "two processes use --forward.source %s: set a unique one for each; if there is only one, its"
        hint = "clock was set back: correct it and restart the process"
        self._lines.warning(message.source, f"{text} {hint}", message.source)
