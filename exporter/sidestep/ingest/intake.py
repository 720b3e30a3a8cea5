"""The intake: decode a frame, run it through the session protocol and apply its items.

There is no I/O and no clock here. The socket loop passes frames and the time, runs one slice of work at a
time and sends the replies. A bad frame or item is counted by reason and dropped; everything else continues.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from sidestep.engines.apply import Applier
from sidestep.engines.items import Item
from sidestep.errors import WireError
from sidestep.ingest.bindings import EngineBindings, Work
from sidestep.ingest.connection_log import ConnectionLog
from sidestep.ingest.engine_metrics import read_metrics
from sidestep.ingest.health import HealthMonitor
from sidestep.metrics.engine import Engine
from sidestep.metrics.hit_ratio_curves import HitRatioCurves
from sidestep.metrics.load_inputs import LoadTracker
from sidestep.metrics.totals_codec import decode_totals
from sidestep.protocol.claims import Placement, numbered_id
from sidestep.protocol.limits import MAX_ITEM_BYTES
from sidestep.protocol.messages import (
    FromExporter,
    FromSender,
    Heartbeat,
    Hello,
    Nack,
    decode_from_sender,
    sender_of,
)
from sidestep.protocol.receiver import Receiver
from sidestep.protocol.stream import Stream, StreamState
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.health.step_times import Thresholds
from sidestep.transport.guard import PeerGuard

log = logging.getLogger(__name__)

Replies = list[tuple[bytes, FromExporter]]
"""Messages to send, each with its connection."""

# Members of an enum are slow to look up before Python 3.12.
_CLOSED = StreamState.CLOSED


class Intake:
    """Decoder of frames and owner of the state that they update.

    Args:
        clock: Monotonic seconds, for limits on log lines and for sources in this process.
        wall: Unix time, for display only.
        guard: Authorization and throttling of peers; by default everything is allowed.
        limits: Seconds without progress after which engines count as stalled.

    Attributes:
        curves: Hit ratios of prefix caches of other sizes.
        refusals: Last refusal by reason, for people.
    """

    def __init__(
        self,
        applier: Applier,
        receiver: Receiver,
        metrics: SelfMetrics,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        guard: PeerGuard | None = None,
        limits: Thresholds | None = None,
    ) -> None:
        self.applier = applier
        self.receiver = receiver
        self.metrics = metrics
        self.registry = registry = applier.registry
        self.guard = guard or PeerGuard(metrics, clock)
        self.accepted = self.items = 0
        self.loads = LoadTracker(registry)
        self.curves = HitRatioCurves(registry)
        self._clock, self._wall = clock, wall
        self.bindings = EngineBindings(registry, receiver)
        self._work: deque[tuple[str, Work]] = deque()
        self._sender = ""
        """Origin of the work in progress, for the log."""
        self._arrived = 0.0
        """Unix time of the frame whose items are being applied."""
        self._lines = RateLimitedLog(log, clock=clock)
        self._connections = ConnectionLog(registry, receiver, clock)
        self.refusals = self._connections.refusals
        self.health = HealthMonitor(registry, receiver, limits or Thresholds(), clock)
        read_metrics(metrics, registry, receiver, self.health)
        metrics.read("sidestep_items_total", lambda: [((), self.items)])

    @property
    def busy(self) -> bool:
        """True if work is queued; while it is, no further frame may be taken."""
        return bool(self._work)

    def accept(self, peer: bytes, frames: Sequence[bytes], now: float, key: str = "") -> Replies:
        """Process a message of the connection ``peer`` and return the replies to it."""
        if not self.guard.allows(peer, key, now):
            return []
        placed: Placement | None = None
        message: FromSender | None = None
        try:
            if len(frames) != 1:
                raise WireError("multipart", f"{len(frames)} frames in a message")  # noqa: TRY301
            self.guard.check(key)
            message = decode_from_sender(frames[0])
            self.metrics.add("sidestep_messages_total", 1, type(message).__name__.lower())
            if isinstance(message, Hello):
                placed = self._place(message, now, key)
                if placed is None:
                    return []
        except WireError as error:
            refused = error
        except Exception as error:  # noqa: BLE001 - a bug costs only its frame, which has changed nothing
            self._log_bug("a message could not be read", error)
            refused = WireError("bug", "it could not be read")
        else:
            return self._receive(peer, message, frames[0], now, placed)
        self.guard.count_invalid(peer, key, now)
        return self._refuse(peer, frames, message, refused)

    def _place(self, hello: Hello, now: float, key: str) -> Placement | None:
        """Return ``hello`` with the ids of its server; None: the sender is to repeat it.

        Raises:
            WireError: Its names or engines are refused.
        """
        self.guard.claim(key, hello)
        placed = self.receiver.place(hello, now)
        if placed is None:
            return None
        self.guard.admit(key, placed.hello, self.receiver.streams.get)
        self.bindings.check(placed.hello)
        return None if self.bindings.must_wait(placed.hello, now) else placed

    def _refuse(
        self, peer: bytes, frames: Sequence[bytes], message: FromSender | None, error: WireError
    ) -> Replies:
        """Count and log a refused message, which is None where it cannot be decoded."""
        self.reject(error.reason)
        if isinstance(message, Hello):
            self._connections.refused(f"stream {message.stream}", error.reason, str(error))
            return self.receiver.refuse_hello(peer, message, error)
        sender = sender_of(frames[0]) if len(frames) == 1 else ""
        name = f"stream {sender}" if sender else self._name(peer)
        self._connections.refused(name, error.reason, str(error))
        return self.receiver.refuse_frame(peer, error) if len(frames) == 1 else []

    def _receive(
        self,
        peer: bytes,
        message: FromSender,
        frame: bytes,
        now: float,
        placed: Placement | None = None,
    ) -> Replies:
        received = self.receiver.receive(peer, message, now, len(frame), placed)
        self.metrics.add("sidestep_duplicates_total", received.duplicates)
        stream = received.stream
        if stream is None:
            self._note_refusals(message, received.replies)
            return received.replies
        self._count_lost(stream, received.lost)
        self.accepted += 1
        sender = f"stream {stream.id}"
        if received.opened:
            if placed is not None and placed.rival is not None:
                self.metrics.add("sidestep_identity_conflicts_total", 1)
                self._connections.conflict(stream, placed.rival)
            works = self.bindings.attach(stream, received.retired, now)
            self._work.extend((sender, work) for work in works)
        elif stream.silent:
            self.bindings.resume(stream)
        self._arrived = self._wall()
        engines = self.bindings.engines[stream.incarnation]
        if isinstance(message, Heartbeat):
            self._report(stream, message, engines, now)
        is_large = len(frame) > MAX_ITEM_BYTES
        items = self._without_oversized(received.items, sender) if is_large else received.items
        has_items = bool(items or received.totals)
        if has_items is not stream.caught_up:
            self.bindings.note_backlog(stream, has_items=has_items, now=now)
        if items:
            # Reversed: the next item is popped from the end.
            self.enqueue(partial(self._apply_items, engines, [*items][::-1]), sender)
        for raw in received.totals:
            self.enqueue(partial(self._add_totals, engines, stream.replica, raw), sender)
        if stream.state is _CLOSED:
            self.bindings.detach(stream, now)
        return received.replies

    def _count_lost(self, stream: Stream, items: int) -> None:
        self.metrics.add("sidestep_lost_items_total", items)
        if items:
            self._connections.lost(stream, items)

    def _note_refusals(self, message: FromSender, replies: Replies) -> None:
        """Count and log a Hello that the receiver refuses, such as one of too many streams."""
        for _, reply in replies:
            if isinstance(message, Hello) and isinstance(reply, Nack):
                self.reject(reply.code)
                text = f"{reply.code}: {reply.detail}"
                self._connections.refused(f"stream {message.stream}", reply.code, text)

    def _report(
        self, stream: Stream, beat: Heartbeat, engines: Sequence[Engine], now: float
    ) -> None:
        """Pass on the progress in ``beat``, which is not kept: a snapshot holds the last heartbeat."""
        # Engines that are not bound yet are missing, and a hostile sender has more of them.
        known = range(min(len(engines), len(stream.engines)))
        reports = [
            (engines[index], stream.engines[index].role, progress)
            for progress in beat.progress
            if (index := progress.engine) in known
        ]
        beat.progress = []
        if reports:
            self.health.report(stream, reports, now)

    def work(self) -> None:
        """Run one slice of work: apply an item, add totals, or bind an engine.

        An error affects only that slice.
        """
        try:
            self._sender, work = self._work.popleft()
            work()
        except WireError as error:
            self.reject(error.reason)
            self._connections.refused(f"an item of {self._sender}", error.reason, str(error))
        except Exception as error:  # noqa: BLE001 - a bug costs only its item, and is logged
            self.reject("bug")
            self._log_bug("an item could not be applied", error)

    def _log_bug(self, what: str, error: Exception) -> None:
        self._lines.error("bug", "%s; this is a bug in sidestep", what, trace=error)

    def enqueue(self, work: Work, sender: str) -> None:
        """Append ``work`` to the queue; ``sender`` names its origin in the log."""
        self._work.append((sender, work))

    def insert(self, works: Sequence[Work]) -> None:
        """Put ``works`` at the front of the queue: they are parts of the work in progress."""
        self._work.extendleft((self._sender, work) for work in reversed(works))

    def reject(self, reason: str, count: int = 1, what: str = "") -> None:
        """Count a rejected frame or item, or rejected totals, by ``reason``; log ``what`` if given."""
        self.metrics.add("sidestep_rejected_total", count, reason)
        log.debug("rejected: %s", reason)
        if count and what:
            self._connections.refused(what, reason, reason)

    def put(self, engine: Engine, item: Item, *, is_answer: bool = True) -> None:
        """Apply an item from a source in this process; the engine may not have answered."""
        self.applier.apply(engine, item)
        if math.isnan(engine.feeds.caught_up_at):
            # The first answer of a server has all that it has counted since the last one.
            engine.feeds.caught_up_at = self._clock()
        if is_answer:
            engine.last_seen = self._wall()
        self.items += 1

    def expire(self, now: float) -> None:
        """Expire silent streams, sources and engines; call about once a second."""
        self.bindings.expire(now)
        self._connections.update()
        self.registry.expire(now)
        self._log_refused()

    def _log_refused(self) -> None:
        for name, count in self.registry.refused_blocks.items():
            self._lines.warning(
                "refused blocks",
                "engine %r: %d sampled KV blocks are not tracked, --kv.max-tracked is reached;"
                " histograms of KV blocks are biased: lower --kv.sample-rate",
                name,
                count,
            )
        self.registry.refused_blocks.clear()
        for name, count in self.registry.refused_requests.items():
            self._lines.warning(
                "refused requests",
                "engine %r: %d requests are not tracked, --requests.max-tracked is reached;"
                " their intervals are in no histogram: raise it",
                name,
                count,
            )
        self.registry.refused_requests.clear()

    def restore(self, streams: Sequence[Stream], now: float) -> None:
        """Restore streams from a snapshot; their engines expose no gauges until a stream's next Hello."""
        self.health.restored(streams, now)
        self._connections.restored(streams)
        for stream in streams:
            stream.seen_at = now
            stream.silent = True
            self.receiver.restore(stream)
            self.bindings.restore(stream)

    def _apply_items(self, engines: list[Engine], raws: list[msgspec.Raw]) -> None:
        """Apply the next item of ``raws``, which is in reverse order; queue the others again."""
        raw = raws.pop()
        if raws:
            self.insert([partial(self._apply_items, engines, raws)])
        item = self.applier.dialects.decode(raw)
        if item.engine >= len(engines):
            raise WireError("unknown_engine")
        engine = engines[item.engine]
        self.applier.apply(engine, item)
        engine.last_seen = self._arrived
        self.items += 1

    def _add_totals(self, engines: list[Engine], replica: int, raw: msgspec.Raw) -> None:
        added = decode_totals(raw)
        name = numbered_id(added.head.engine.id, replica)
        engine = next((e for e in engines if e.id == name), None)
        if engine is None:
            raise WireError("unknown_engine")
        moved = self.applier.add_totals(engine, added)
        self.metrics.add("sidestep_rebucketed_observations_total", moved)
        engine.last_seen = self._arrived
        self.items += 1

    def _without_oversized(
        self, items: Sequence[msgspec.Raw], sender: str
    ) -> Sequence[msgspec.Raw]:
        """Return ``items`` of a large frame without those over the size limit."""
        allowed = [raw for raw in items if len(raw) <= MAX_ITEM_BYTES]
        if len(allowed) < len(items):
            self.reject("too_big", len(items) - len(allowed))
            error = WireError("too_big", f"{max(map(len, items))} bytes")
            self._connections.refused(f"an item of {sender}", error.reason, str(error))
        return allowed

    def _name(self, peer: bytes) -> str:
        """Return the stream of a connection, for the log."""
        streams = self.receiver.streams.values()
        names = (f"stream {stream.id}" for stream in streams if stream.peer == peer)
        return next(names, f"connection {peer.hex()}")
