"""The ROUTER socket: drain, decode, session, apply; and counts of what it refuses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from sidestep.access import Access
from sidestep.apply import Applier
from sidestep.catalogue.self_metrics import PER_ENGINE
from sidestep.errors import WireError
from sidestep.guard import Guard
from sidestep.listener import SKIPPING, Listener
from sidestep.process import resident
from sidestep.registry import Engine, Registry
from sidestep.selfmetrics import LagMeter, SelfMetrics
from sidestep.session.receiver import Receiver, Stream
from sidestep.upkeep import Upkeep
from sidestep.watchdog import Watchdog
from sidestep.wire.items import decode_item
from sidestep.wire.limits import MAX_ITEM_BYTES
from sidestep.wire.messages import FromExporter, Heartbeat, Hello, decode_from_sender, encode

log = logging.getLogger(__name__)

BUDGET = 0.002
"""Seconds of the event loop that one turn of draining may take."""
TICK = 0.05
"""libzmq's descriptor is edge-triggered: look at the socket this often all the same."""
CLOSING = 1.0
BUG_LOG_INTERVAL = 60.0


class Ingest:
    """Owns the socket and everything between it and the registry."""

    def __init__(
        self,
        registry: Registry,
        metrics: SelfMetrics,
        *,
        boot: int,
        access: Access = Access(),  # noqa: B008 - frozen
        watchdog: Watchdog | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.registry = registry
        self.metrics = metrics
        self.receiver = Receiver(boot)
        self.applier = Applier(registry)
        self.lag = LagMeter(clock)
        self._clock = clock
        self._wall = wall
        self._access = access
        self._watchdog = watchdog or Watchdog(0, 0, resident)
        self._guard = Guard(access, self._watchdog, metrics)
        self._listener: Listener | None = None
        self._upkeep: Upkeep | None = None
        self._engines: dict[int, list[Engine]] = {}
        """By incarnation: what a stream's engine indices mean."""
        self._backlog: deque[tuple[list[Engine], msgspec.Raw]] = deque()
        self._scheduled = self._ack_due = False
        self._tick: asyncio.TimerHandle | None = None
        self._arrived = 0.0
        """Unix time of the frame whose items are being applied."""
        self._applied = 0
        self._bug_logged_at = -BUG_LOG_INTERVAL
        self._read_metrics()

    @property
    def endpoints(self) -> list[str]:
        """Where engines connect; a port 0 shows as the one that was found."""
        return [] if self._listener is None else self._listener.endpoints

    def open(self, endpoints: Iterable[str]) -> None:
        """Bind and start to drain in the running event loop.

        Raises:
            ConfigError: An endpoint is malformed, taken, or may not be bound.
        """
        self._listener = Listener(
            list(endpoints),
            self._access,
            lambda: self.metrics.add("sidestep_auth_denied_total", 1, "curve"),
        )
        self._upkeep = Upkeep(self._listener, self._watchdog, self.metrics)
        self._watch(self._listener)
        loop = asyncio.get_running_loop()
        self._tick = loop.call_later(TICK, self._on_tick, loop.time() + TICK)

    def close(self) -> None:
        """Apply what has arrived, acknowledge it, and unbind."""
        if self._listener is None:
            return
        self._unwatch(self._listener)
        if self._tick is not None:
            self._tick.cancel()
        # What has arrived, but not for as long as a flood lasts.
        self._turn(CLOSING)
        self._reply(self.receiver.acks(float("inf")))
        # The final acknowledgements still sit in libzmq: give them a moment to leave.
        self._listener.close(linger=200)
        self._listener = None

    def _watch(self, listener: Listener) -> None:
        for descriptor in listener.descriptors:
            asyncio.get_running_loop().add_reader(descriptor, self._drain)

    def _unwatch(self, listener: Listener) -> None:
        for descriptor in listener.descriptors:
            asyncio.get_running_loop().remove_reader(descriptor)

    # Two sources that re-arm each other would take the loop hostage: one flag
    # says that a turn is coming, and whoever finds it set leaves.
    def _drain(self) -> None:
        if not self._scheduled and self._turn(BUDGET):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._again)

    def _again(self) -> None:
        self._scheduled = False
        self._drain()

    def _on_tick(self, expected: float) -> None:
        loop = asyncio.get_running_loop()
        self.lag.note(loop.time() - expected)
        self._ack_due = True
        self.applier.drain()
        self._keep_up()
        self._drain()
        due = loop.time() + TICK
        self._tick = loop.call_at(due, self._on_tick, due)

    def _keep_up(self) -> None:
        """What the transport needs now and then."""
        now = self._clock()
        self._guard.refresh(now)
        if self._listener is not None and self._upkeep is not None and self._upkeep.due(now):
            self._unwatch(self._listener)
            self._upkeep.act(now)
            self._watch(self._listener)

    def _turn(self, budget: float) -> bool:
        """Work for ``budget`` seconds at most; whether there is more to do."""
        listener = self._listener
        if listener is None:
            return False
        deadline = time.perf_counter() + budget
        more = listener.authenticate()
        while True:
            while self._backlog:
                self._apply(*self._backlog.popleft())
                if time.perf_counter() > deadline:
                    return True
            if self._ack_due:
                # Between two frames all that was consumed is applied. Waiting for a turn that
                # finds nothing to do would starve the senders of a busy exporter.
                self._ack_due = False
                self._reply(self.receiver.acks(self._clock()))
            arrival = listener.receive()
            if arrival is None:
                return more
            peer, key, frames = arrival
            if arrival is not SKIPPING and self._guard.hears(peer, key, self._clock()):
                self._take(peer, frames, key)
            # Most frames bring items, whose time is counted above; a flood of others would not.
            if not self._backlog and time.perf_counter() > deadline:
                return True

    def _take(self, peer: bytes, frames: list[bytes], key: str) -> None:
        if len(frames) != 1:
            self._reject("multipart")
            self._guard.bad(peer, key, self._clock())
            return
        try:
            self._guard.check(key)
            message = decode_from_sender(frames[0])
        except WireError as error:
            self._reject(error.reason)
            self._guard.bad(peer, key, self._clock())
            self._reply(self.receiver.refuse_frame(peer, error))
            return
        self.metrics.add("sidestep_messages_total", 1, type(message).__name__.lower())
        if isinstance(message, Hello):
            try:
                for info in message.engines:
                    self.registry.check(info)
                self._guard.admit(key, message, self.receiver.streams.get)
            except WireError as error:
                self._reject(error.reason)
                self._guard.bad(peer, key, self._clock())
                self._reply(self.receiver.refuse_hello(peer, message, error).replies)
                return
        received = self.receiver.receive(peer, message, self._clock())
        self._reply(received.replies)
        self.metrics.add("sidestep_duplicates_total", received.duplicates)
        self.metrics.add("sidestep_lost_items_total", received.lost)
        stream = received.stream
        if stream is not None and received.greeted:
            self._greet(stream, received.retired)
        if stream is not None:
            self._arrived = self._wall()
            engines = self._engines[stream.incarnation]
            self._backlog.extend((engines, raw) for raw in self._sized(frames[0], received.items))
            if not stream.open:
                self._part(stream.incarnation)

    def _sized(self, frame: bytes, items: Sequence[msgspec.Raw]) -> Sequence[msgspec.Raw]:
        """``items`` without those over the limit, which only a large frame can hold."""
        if len(frame) <= MAX_ITEM_BYTES:
            return items
        kept = [raw for raw in items if len(memoryview(raw)) <= MAX_ITEM_BYTES]
        for _ in range(len(items) - len(kept)):
            self._reject("too_big")
        return kept

    def _greet(self, stream: Stream, retired: int | None) -> None:
        """Bind the stream's engine indices to engines."""
        if retired is not None:
            self._part(retired)
            self._engines.pop(retired, None)
        engines = [self.registry.register(info) for info in stream.engines]
        for engine in engines:
            engine.streams.add(stream.incarnation)
            if retired is not None:
                engine.restarts += 1
                # A new process may be on a host that was started anew, its monotonic clock with it.
                engine.gauge_stamp = 0.0
        self._engines[stream.incarnation] = engines
        # A stream that the receiver has forgotten has nothing more to say here either.
        known = {stream.incarnation for stream in self.receiver.streams.values()}
        for gone in self._engines.keys() - known:
            self._part(gone)
            del self._engines[gone]

    def _part(self, incarnation: int) -> None:
        for engine in self._engines.get(incarnation, ()):
            engine.streams.discard(incarnation)

    def _apply(self, engines: list[Engine], raw: msgspec.Raw) -> None:
        """Apply one item; whatever is wrong with it costs that item alone."""
        try:
            item = decode_item(raw)
            if item.engine >= len(engines):
                raise WireError("unknown_engine")  # noqa: TRY301 - one place contains all
            engine = engines[item.engine]
            self.applier.apply(engine, item)
        except WireError as error:
            self._reject(error.reason)
        except Exception:
            self._reject("bug")
            if self._clock() - self._bug_logged_at >= BUG_LOG_INTERVAL:
                self._bug_logged_at = self._clock()
                log.exception("an item could not be applied; this is a bug in sidestep")
        else:
            engine.last_seen = self._arrived
            self._applied += 1

    def _reject(self, reason: str) -> None:
        self.metrics.add("sidestep_rejected_total", 1, reason)
        log.debug("refused: %s", reason)

    def _reply(self, replies: Iterable[tuple[bytes, FromExporter]]) -> None:
        if self._listener is not None:
            for peer, message in replies:
                self._listener.send(peer, encode(message))

    def _read_metrics(self) -> None:
        """Self-metrics that are somebody's present state."""

        def of_engines(
            read: Callable[[Engine], float],
        ) -> Callable[[], list[tuple[tuple[str, ...], float]]]:
            return lambda: [
                (tuple(engine.labels.get(name, "") for name in PER_ENGINE), read(engine))
                for engine in self.registry.engines.values()
            ]

        read = self.metrics.read
        read("sidestep_engine_up", of_engines(lambda engine: float(bool(engine.streams))))
        read("sidestep_engine_restarts_total", of_engines(lambda engine: engine.restarts))
        read(
            "sidestep_engine_last_seen_timestamp_seconds",
            of_engines(lambda engine: engine.last_seen),
        )
        streams = self.receiver.streams
        read("sidestep_streams", lambda: [((), sum(s.open for s in streams.values()))])
        read("sidestep_items_total", lambda: [((), self._applied)])
        read("sidestep_engines", lambda: [((), len(self.registry.engines))])
        read("sidestep_stream_ring_bytes", lambda: list(map(_ring_bytes, streams.values())))
        read(
            "sidestep_stream_push_dropped_total",
            lambda: [((s.id,), s.dropped) for s in streams.values()],
        )
        read(
            "sidestep_stream_errors_total", lambda: [((s.id,), s.errors) for s in streams.values()]
        )
        read("sidestep_label_values_limited_total", lambda: [((), self.registry.limited)])
        read("sidestep_ingest_lag_seconds", self.lag.reading)


def _ring_bytes(stream: Stream) -> tuple[tuple[str, ...], float]:
    beat: Heartbeat | None = stream.beat
    return (stream.id,), beat.ring_bytes if beat is not None else 0
