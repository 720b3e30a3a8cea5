"""The intake: decode a frame, run it through the session protocol and apply its items.

There is no I/O and no clock here. The socket loop passes frames and the time, runs one slice of
work at a time and sends the replies. A bad frame or item is counted by reason and dropped;
everything else continues.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from sidestep.engines.apply import Applier
from sidestep.engines.dialect import Dialects
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import Item
from sidestep.errors import WireError
from sidestep.ingest.bindings import EngineBindings, Work
from sidestep.ingest.connection_log import ConnectionLog
from sidestep.ingest.engine_metrics import read_metrics
from sidestep.ingest.health import HealthMonitor
from sidestep.metrics.engine import Engine
from sidestep.metrics.hit_ratio_curves import HitRatioCurves
from sidestep.metrics.load_inputs import LoadTracker
from sidestep.metrics.record_codec import decode_record
from sidestep.metrics.registry import Registry
from sidestep.protocol.claims import Placement, numbered_id
from sidestep.protocol.limits import MAX_ITEM_BYTES
from sidestep.protocol.messages import (
    FromExporter,
    FromSender,
    Heartbeat,
    Hello,
    Nack,
    Settings,
    decode_from_sender,
    sender_of,
)
from sidestep.protocol.receiver import Receiver
from sidestep.protocol.stream import Stream, StreamState
from sidestep.requests.request_log import RequestLog
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
        wall: Unix time, for display only.
        durable: Whether snapshots are written, so that senders hold their frames until then.
        settings: Settings by which senders fold.
        guard: Authorization and throttling of peers; by default everything is allowed.
        limits: Seconds without progress after which engines count as stalled.
        dialects: Those of the registry's layouts.
        request_log: Log of the requests that end; None: there is none.

    Attributes:
        bindings: Streams and the engines that they feed.
        loads: Saturation of the engines that are counted here.
        curves: Hit ratios of prefix caches of other sizes.
        health: Health of these engines.
        refused: Frames rejected so far.
        refusals: Last refusal by reason, for people.
        items: Items applied so far.
    """

    def __init__(
        self,
        registry: Registry,
        metrics: SelfMetrics,
        *,
        boot: int,
        clock: Callable[[], float],
        wall: Callable[[], float],
        durable: bool = False,
        settings: Settings | None = None,
        guard: PeerGuard | None = None,
        limits: Thresholds | None = None,
        dialects: Dialects = DIALECTS,
        request_log: RequestLog | None = None,
    ) -> None:
        self.registry = registry
        self.metrics = metrics
        self.request_log = request_log
        self.receiver = Receiver(boot, settings, durable=durable)
        self.applier = Applier(registry, dialects)
        self._decode = dialects.decode
        self.guard = guard or PeerGuard(metrics, clock)
        self.accepted = self.refused = self.items = 0
        self.loads = LoadTracker(registry)
        self.curves = HitRatioCurves(registry)
        self._clock, self._wall = clock, wall
        self.bindings = EngineBindings(registry, self.receiver)
        self._work: deque[Work] = deque()
        self._sender = ""
        """The stream whose items are being applied, for the log."""
        self._arrived = 0.0
        """Unix time of the frame whose items are being applied."""
        self._lines = RateLimitedLog(log, clock=clock)
        self._connections = ConnectionLog(registry, self.receiver, clock)
        self.refusals = self._connections.refusals
        self.health = HealthMonitor(registry, self.receiver, limits or Thresholds(), clock)
        read_metrics(metrics, registry, self.receiver, self.health)
        metrics.read("sidestep_items_total", lambda: [((), self.items)])

    @property
    def busy(self) -> bool:
        """True if work is queued; while it is, no further frame may be taken."""
        return bool(self._work)

    def accept(self, peer: bytes, frames: Sequence[bytes], now: float, key: str = "") -> Replies:
        """Process a message of the connection ``peer`` and return the replies to it.

        Args:
            peer: The connection that replies go to.
            frames: Frames of the message; a valid message has exactly one.
            now: Monotonic seconds.
            key: Public key that the peer has authenticated with; empty where none is required.
        """
        if not self.guard.allows(peer, key, now):
            return []
        refused = self.refused
        replies = self._accept(peer, frames, now, key)
        if self.refused != refused:
            self.guard.count_invalid(peer, key, now)
        return replies

    def _accept(self, peer: bytes, frames: Sequence[bytes], now: float, key: str) -> Replies:
        if len(frames) != 1:
            return self._refuse(
                self._name(peer), WireError("multipart", f"{len(frames)} frames in a message")
            )
        try:
            self.guard.check(key)
            message = decode_from_sender(frames[0])
        except WireError as error:
            sender = sender_of(frames[0])
            self._refuse(f"stream {sender}" if sender else self._name(peer), error)
            return self.receiver.refuse_frame(peer, error)
        self.metrics.add("sidestep_messages_total", 1, type(message).__name__.lower())
        if isinstance(message, Hello):
            return self._accept_hello(peer, message, frames[0], now, key)
        return self._receive(peer, message, frames[0], now)

    def _accept_hello(
        self, peer: bytes, hello: Hello, frame: bytes, now: float, key: str
    ) -> Replies:
        try:
            self.guard.admit(key, hello, self.receiver.streams.get)
            placed = self.receiver.place(hello, now)
            if placed is not None:
                self.bindings.check(placed.hello)
        except WireError as error:
            self._refuse(f"stream {hello.stream}", error)
            return self.receiver.refuse_hello(peer, hello, error).replies
        if placed is None or self.bindings.must_wait(placed.hello, now):
            return []
        return self._receive(peer, hello, frame, now, placed)

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
        self.metrics.add("sidestep_lost_items_total", received.lost)
        stream = received.stream
        if stream is None:
            self._log_refusals(message, received.replies)
            return received.replies
        self.accepted += 1
        if received.opened:
            if placed is not None and placed.rival is not None:
                self.metrics.add("sidestep_identity_conflicts_total", 1)
                self._connections.conflict(stream, placed.rival)
            self._work.extend(self.bindings.attach(stream, received.retired, now))
        elif stream.silent:
            self.bindings.resume(stream)
        self._sender = f"stream {stream.id}"
        self._arrived = self._wall()
        engines = self.bindings.engines[stream.incarnation]
        if isinstance(message, Heartbeat):
            self._report(stream, message, engines, now)
        raws = self._without_oversized(frame, received.items, stream.id)
        self.bindings.note_backlog(stream, has_items=bool(raws or received.records), now=now)
        if raws:
            # Reversed: the next item is popped from the end.
            self._work.append(partial(self._apply_items, engines, [*raws][::-1]))
        self._work.extend(
            partial(self._add_record, engines, stream.replica, raw) for raw in received.records
        )
        if stream.state is _CLOSED:
            self.bindings.detach(stream, now)
        return received.replies

    def _log_refusals(self, message: FromSender, replies: Replies) -> None:
        for _, reply in replies:
            if isinstance(message, Hello) and isinstance(reply, Nack):
                text = reply.detail or reply.code
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
        """Run one slice of work: apply an item or a record, run a step or bind an engine.

        An error affects only that slice.
        """
        try:
            self._work.popleft()()
        except WireError as error:
            self.reject(error.reason)
            self._connections.refused(f"an item of {self._sender}", error.reason, str(error))
        except Exception as error:  # noqa: BLE001 - a bug costs only its item, and is logged
            self.reject("bug")
            self._lines.error(
                "bug", "an item could not be applied; this is a bug in sidestep", trace=error
            )

    def enqueue(self, work: Work) -> None:
        """Append ``work`` to the queue."""
        self._work.append(work)

    def insert(self, works: Sequence[Work]) -> None:
        """Put ``works`` at the front of the queue: they are parts of the work in progress."""
        self._work.extendleft(reversed(works))

    def reject(self, reason: str, count: int = 1) -> None:
        """Count a rejected frame, item or record by ``reason``."""
        self.metrics.add("sidestep_rejected_total", count, reason)
        log.debug("rejected: %s", reason)

    def put(self, engine: Engine, item: Item) -> None:
        """Apply an item from a source in this process.

        Raises:
            WireError: See ``Applier.apply``.
        """
        self.applier.apply(engine, item)
        if math.isnan(engine.caught_up_at):
            # The first answer of a server has all that it has counted since the last one.
            engine.caught_up_at = self._clock()
        self._arrived = self._wall()
        self._applied(engine)

    def expire(self, now: float) -> None:
        """Expire silent streams, sources and engines; call about once a second."""
        self.bindings.expire(now)
        self._connections.update()
        self.registry.expire(now)
        self._log_refused_blocks()

    def _log_refused_blocks(self) -> None:
        for name, count in self.registry.refused_blocks.items():
            self._lines.warning(
                "refused blocks",
                "engine %r: %d sampled KV blocks are not tracked, --kv.max-tracked is reached;"
                " histograms of KV blocks are biased: lower --kv.sample-rate",
                name,
                count,
            )
        self.registry.refused_blocks.clear()

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
            self._work.appendleft(partial(self._apply_items, engines, raws))
        item = self._decode(raw)
        if item.engine >= len(engines):
            raise WireError("unknown_engine")
        engine = engines[item.engine]
        self.applier.apply(engine, item)
        self._applied(engine)

    def _add_record(self, engines: list[Engine], replica: int, raw: msgspec.Raw) -> None:
        record = decode_record(raw)
        name = numbered_id(record.head.engine.id, replica)
        engine = next((e for e in engines if e.id == name), None)
        if engine is None:
            raise WireError("unknown_engine")
        moved = self.applier.add_record(engine, record)
        self.metrics.add("sidestep_rebucketed_observations_total", moved)
        self._applied(engine)

    def _applied(self, engine: Engine) -> None:
        engine.last_seen = self._arrived
        self.items += 1

    def _without_oversized(
        self, frame: bytes, items: Sequence[msgspec.Raw], sender: str
    ) -> Sequence[msgspec.Raw]:
        """Return ``items`` without those over the size limit, which only a large frame can hold."""
        if len(frame) <= MAX_ITEM_BYTES:
            return items
        allowed = [raw for raw in items if len(raw) <= MAX_ITEM_BYTES]
        if len(allowed) < len(items):
            self.reject("too_big", len(items) - len(allowed))
            error = WireError("too_big", f"{max(map(len, items))} bytes")
            self._connections.refused(f"an item of stream {sender}", error.reason, str(error))
        return allowed

    def _name(self, peer: bytes) -> str:
        """Return the stream of a connection, for the log."""
        streams = self.receiver.streams.values()
        names = (f"stream {stream.id}" for stream in streams if stream.peer == peer)
        return next(names, f"connection {peer.hex()}")

    def _refuse(self, sender: str, error: WireError) -> Replies:
        self.refused += 1
        self.reject(error.reason)
        self._connections.refused(sender, error.reason, str(error))
        return []
