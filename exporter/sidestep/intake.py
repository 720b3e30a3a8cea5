"""What becomes of a frame: decode, session, apply. All of an exporter but its socket and its pages.

No I/O here, and no clock: whoever owns the socket brings frames and the time, asks
for a slice of work at a time, and sends the answers. Whatever is wrong with a frame or
an item is counted by reason and costs itself.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from sidestep.apply import Applier
from sidestep.catalogue import is_part
from sidestep.catalogue.self_metrics import PER_ENGINE
from sidestep.descriptions import check as check_engines
from sidestep.descriptions import excess
from sidestep.engine import Engine
from sidestep.errors import WireError
from sidestep.forwarded import Forwarded
from sidestep.hearsay import Hearsay, Replies
from sidestep.logs import Limited
from sidestep.records import decode_record
from sidestep.registry import GONE, SILENT, Registry
from sidestep.selfmetrics import SelfMetrics
from sidestep.session.lives import new_life
from sidestep.session.receiver import Receiver, Stream
from sidestep.transport.guard import Guard
from sidestep.wire.forwarded import is_forward
from sidestep.wire.items import Item, decode_item
from sidestep.wire.limits import MAX_ITEM_BYTES
from sidestep.wire.messages import (
    EngineInfo,
    FromSender,
    Heartbeat,
    Hello,
    decode_from_sender,
)

log = logging.getLogger(__name__)

MANY = 4
"""Items of an engine in one frame from which on it is worth while to gather what they observe."""
PART = 8 << 10
"""Bytes of small items that are applied in one go: 0.3 ms; at worst what one dear item takes."""

WAITING = 16 << 10
"""Bytes of items whose observations may wait: to make those takes up to 1 ms, of the same turn."""

Work = Callable[[], None]


class Intake:
    """Takes frames, and has the state that they come to.

    Args:
        wall: Unix time, told to people only.
        guard: Knows who may say what; by default everybody may say everything.
        merge: Whether engines of one identity are one, whichever exporter forwards them.

    Attributes:
        forwarded: Engines that other exporters count.
        life: Of the counts here; see ``session.lives``. A snapshot goes on with its own.
        run: Which of the processes that went on with it.
        refused: Frames that could not be taken, so far.
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
        guard: Guard | None = None,
        merge: bool = False,
    ) -> None:
        self.registry = registry
        self.metrics = metrics
        self.receiver = Receiver(boot)
        self.applier = Applier(registry)
        self.guard = guard or Guard(metrics, clock)
        self.refused = self.items = 0
        self.forwarded = Forwarded(registry, merge=merge)
        self._hearsay = Hearsay(self.forwarded, self.receiver, metrics, clock)
        self.life, self.run = new_life(wall(), boot), 1
        self._wall = wall
        self._engines: dict[int, list[Engine]] = {}
        """By incarnation: what a stream's engine indices mean."""
        self._work: deque[Work] = deque()
        self._waiting = 0
        """Bytes of items whose observations are not made yet."""
        self._arrived = 0.0
        """Unix time of the frame whose items are being applied."""
        self._bugs = Limited(log, clock=clock)
        self._read_metrics()

    @property
    def busy(self) -> bool:
        """Whether there is something to apply; until then no further frame may be taken."""
        return bool(self._work)

    def take(self, peer: bytes, frames: Sequence[bytes], now: float, key: str = "") -> Replies:
        """Take in a message of the connection ``peer``; the answers to it.

        Args:
            peer: Where the answers go.
            frames: One, in a message as it should be.
            now: Monotonic seconds.
            key: What the peer has proved to own, if it had to.
        """
        if not self.guard.hears(peer, key, now):
            return []
        refused = self.refused
        replies = self._take(peer, frames, now, key)
        if self.refused != refused:
            self.guard.bad(peer, key, now)
        return replies

    def _take(self, peer: bytes, frames: Sequence[bytes], now: float, key: str) -> Replies:
        if len(frames) != 1:
            return self._refuse("multipart")
        if is_forward(frames[0]):
            return self._take_forward(peer, frames[0], now, key)
        try:
            self.guard.check(key)
            message = decode_from_sender(frames[0])
        except WireError as error:
            return [*self._refuse(error.reason), *self.receiver.refuse_frame(peer, error)]
        self.metrics.add("sidestep_messages_total", 1, type(message).__name__.lower())
        if isinstance(message, Hello):
            try:
                check_engines(self.registry, self._named_by_others(message), message.engines)
                self.guard.admit(key, message, self.receiver.streams.get)
            except WireError as error:
                refusal = self.receiver.refuse_hello(peer, message, error)
                return [*self._refuse(error.reason), *refusal.replies]
        return self._receive(peer, message, frames[0], now)

    def _receive(self, peer: bytes, message: FromSender, frame: bytes, now: float) -> Replies:
        received = self.receiver.receive(peer, message, now)
        self.metrics.add("sidestep_duplicates_total", received.duplicates)
        self.metrics.add("sidestep_lost_items_total", received.lost)
        stream = received.stream
        if stream is None:
            return received.replies
        if received.greeted:
            self._greet(stream, received.retired, now)
        elif stream.silent:
            stream.silent = False
            self._join(stream)
        self._arrived = self._wall()
        engines = self._engines[stream.incarnation]
        raws = self._sized(frame, received.items)
        if raws:
            # The next one last, where it is cheap to take away.
            self._work.append(partial(self._apply_items, engines, [*raws][::-1], len(raws)))
        self._work.extend(partial(self._add_record, engines, raw) for raw in received.records)
        if not stream.open:
            self._part(stream, now)
        return received.replies

    def _take_forward(self, peer: bytes, frame: bytes, now: float, key: str) -> Replies:
        try:
            steps = self._hearsay.take(self.guard, peer, frame, now, key)
        except WireError as error:
            return self._refuse(error.reason)
        if steps is not None:
            self._begin(steps)
        return []

    def answers(self) -> Replies:
        """What other exporters are to be told now, each once."""
        return self._hearsay.answers()

    def _begin(self, steps: Iterator[None]) -> None:
        """Let work that takes ``steps`` have its turn: others wait until it has taken all."""
        self._work.append(partial(self._go_on, steps))

    def _go_on(self, steps: Iterator[None]) -> None:
        for _ in steps:
            self._work.appendleft(partial(self._go_on, steps))
            return

    def work(self) -> None:
        """Apply an item or some small ones, take a step, or bind an engine; what is wrong costs that one alone.

        Where ``busy`` says that there is more, ``settle`` before others have their turn.
        """
        try:
            self._work.popleft()()
        except WireError as error:
            self.reject(error.reason)
        except Exception as error:  # noqa: BLE001 - a bug of ours costs its item, and is loud
            self._has_bug(error)
        if not self._work or self._waiting >= WAITING:
            self.settle()

    def settle(self) -> None:
        """Have all that was applied be in the series, before anybody looks at them."""
        self._waiting = 0
        settled = False
        while not settled:
            try:
                self.applier.settle()
                settled = True
            except Exception as error:  # noqa: BLE001 - likewise; what others observed goes on
                self._has_bug(error)

    def _has_bug(self, error: Exception) -> None:
        self.reject("bug")
        self._bugs.error(
            "bug", "an item could not be applied; this is a bug in sidestep", trace=error
        )

    def enqueue(self, work: Work) -> None:
        """Let ``work`` have its turn after all that waits."""
        self._work.append(work)

    def insert(self, works: Sequence[Work]) -> None:
        """Let ``works`` have their turn before all that waits: parts of the work under way."""
        self._work.extendleft(reversed(works))

    def reject(self, reason: str, count: int = 1) -> None:
        """Count what was refused."""
        self.metrics.add("sidestep_rejected_total", count, reason)
        log.debug("refused: %s", reason)

    def join(self, stream: Stream, info: EngineInfo) -> Engine:
        """Let a stream of this process feed the engine that ``info`` names.

        Raises:
            WireError: The engine cannot be shown.
        """
        named = sum(len(each.engines) for each in self.receiver.streams.values())
        check_engines(self.registry, named, [info])
        engine = self.registry.register(info)
        engine.excess = excess(self.registry, info)
        fed = self._engines.setdefault(stream.incarnation, [])
        # It may have been forgotten meanwhile, and be another now.
        fed[:] = [*(each for each in fed if each.id != engine.id), engine]
        stream.engines = [*(each for each in stream.engines if each.id != info.id), info]
        self.receiver.changes += 1
        self._feed(stream, engine)
        return engine

    def put(self, engine: Engine, item: Item) -> None:
        """Apply an item of a stream of this process.

        Raises:
            WireError: See ``Applier.apply``.
        """
        self.applier.apply(engine, item)
        self._arrived = self._wall()
        self._applied(engine)

    def part(self, stream: Stream, identity: str) -> None:
        """A stream of this process feeds one of its engines no more."""
        stream.engines = [info for info in stream.engines if info.id != identity]
        self.receiver.changes += 1
        fed = self._engines.get(stream.incarnation, [])
        for engine in fed:
            if engine.id == identity:
                engine.streams.discard(stream.incarnation)
                engine.heard = max(engine.heard, stream.heard)
                self.registry.touch(engine)
        fed[:] = [engine for engine in fed if engine.id != identity]

    def silence(self, stream: Stream, heard: float) -> None:
        """Nothing was heard of ``stream`` since ``heard``: it feeds nobody until it is heard again."""
        stream.silent = True
        self._part(stream, heard)

    def pass_time(self, now: float) -> None:
        """Notice who has fallen silent; about once a second."""
        for stream in self.receiver.streams.values():
            if stream.open and not stream.silent and now - stream.heard >= SILENT:
                self.silence(stream, stream.heard)
            if stream.incarnation in self._engines and now - stream.heard >= GONE:
                # Its engines are not shown any more: before it feeds any it has to greet.
                self._leave(stream.incarnation, stream.heard)
                stream.peer = b""
        self._begin(self._hearsay.pass_time(now))
        self.registry.pass_time(now)

    def restore(self, streams: Sequence[Stream], now: float) -> None:
        """Know streams from a snapshot; what they feed shows no gauges until they greet."""
        for stream in streams:
            stream.heard = now
            stream.silent = True
            self.receiver.restore(stream)

    def _apply_items(self, engines: list[Engine], raws: list[msgspec.Raw], count: int) -> None:
        """Apply the next of ``raws``, which a frame brought ``count`` of: one that is dear, or some.

        The last one is next. Those after one that cannot be applied have another turn.
        """
        are_many = count >= MANY * len(engines)
        size = 0
        try:
            while raws and size < PART:
                raw = raws.pop()
                item = decode_item(raw)
                if item.engine >= len(engines):
                    raise WireError("unknown_engine")
                engine = engines[item.engine]
                if are_many and self.applier.gather(engine, item):
                    size += len(raw)
                    self._waiting += len(raw)
                else:
                    self.applier.apply(engine, item)
                    size = PART
                self._applied(engine)
        finally:
            if raws:
                self._work.appendleft(partial(self._apply_items, engines, raws, count))

    def _add_record(self, engines: list[Engine], raw: msgspec.Raw) -> None:
        record = decode_record(raw)
        engine = next((e for e in engines if e.id == record.head.engine.id), None)
        if engine is None:
            raise WireError("unknown_engine")
        moved = self.applier.add(engine, record)
        self.metrics.add("sidestep_rebucketed_observations_total", moved)
        self._applied(engine)

    def _applied(self, engine: Engine) -> None:
        engine.last_seen = self._arrived
        self.items += 1

    def _sized(self, frame: bytes, items: Sequence[msgspec.Raw]) -> Sequence[msgspec.Raw]:
        """``items`` without those over the limit, which only a large frame can hold."""
        if len(frame) <= MAX_ITEM_BYTES:
            return items
        kept = [raw for raw in items if len(memoryview(raw)) <= MAX_ITEM_BYTES]
        for _ in range(len(items) - len(kept)):
            self.reject("too_big")
        return kept

    def _greet(self, stream: Stream, retired: int | None, now: float) -> None:
        """Bind the stream's engine indices to engines, one at a time: hundreds take a while."""
        if retired is not None:
            self._leave(retired, now)
        # What this process named before; None where it said nothing yet, or to another exporter.
        named = self._engines.get(stream.incarnation)
        before = [] if named is None else named
        engines = self._engines[stream.incarnation] = []
        stream.silent = False

        def is_new(engine: Engine) -> bool:
            """Whether it had another process, which this one has replaced."""
            if retired is not None or named is None:
                return retired is not None
            # A process names some engines only when it hears of them itself.
            return bool(stream.retired and engine.last_seen) and engine not in named

        for index, info in enumerate(stream.engines):
            self._work.append(partial(self._bind, stream, info, engines, index, is_new))
        self._work.append(partial(self._bound, stream, before, now))

    def _bind(
        self,
        stream: Stream,
        info: EngineInfo,
        engines: list[Engine],
        index: int,
        is_new: Callable[[Engine], bool],
    ) -> None:
        """The next of ``engines``; ``is_new``: whether it has another process than before."""
        if len(engines) < index:
            # One before it failed: better no engine than the wrong one.
            raise WireError("unknown_engine")
        engine = self.registry.register(info)
        engine.excess = excess(self.registry, info)
        if is_new(engine):
            engine.restarts += 1
            self.registry.renew(engine)
        self._feed(stream, engine)
        engines.append(engine)

    def _bound(self, stream: Stream, before: Sequence[Engine], now: float) -> None:
        """The stream feeds what it named, and not any more what it named ``before``."""
        fed = set(self._engines.get(stream.incarnation, ()))
        for engine in before:
            if engine not in fed:
                engine.streams.discard(stream.incarnation)
                engine.heard = max(engine.heard, now)
        # A stream that the receiver has forgotten has nothing more to say here either.
        known = {stream.incarnation for stream in self.receiver.streams.values()}
        for gone in self._engines.keys() - known:
            self._leave(gone, now)

    def _join(self, stream: Stream) -> None:
        # Another process may have come with other labels for one of them meanwhile.
        there = self.registry.engines
        engines = [there.get(e.id, e) for e in self._engines[stream.incarnation]]
        self._engines[stream.incarnation] = engines
        for engine in engines:
            self._feed(stream, engine)

    def _feed(self, stream: Stream, engine: Engine) -> None:
        engine.streams.add(stream.incarnation)
        engine.live = True
        self.registry.touch(engine)

    def _named_by_others(self, hello: Hello) -> int:
        streams = self.receiver.streams.values()
        return sum(len(stream.engines) for stream in streams if stream.id != hello.stream)

    def _part(self, stream: Stream, heard: float) -> None:
        """The stream does not feed its engines any more, since ``heard``."""
        for engine in self._engines.get(stream.incarnation, ()):
            engine.streams.discard(stream.incarnation)
            engine.heard = max(engine.heard, heard)

    def _leave(self, incarnation: int, now: float) -> None:
        for engine in self._engines.pop(incarnation, ()):
            engine.streams.discard(incarnation)
            engine.heard = max(engine.heard, now)

    def _refuse(self, reason: str) -> Replies:
        self.refused += 1
        self.reject(reason)
        return []

    def _by_labels(self) -> Iterator[tuple[tuple[str, ...], Engine]]:
        """Engines by the labels of self-metrics; those that have more are told apart by theirs."""
        keys = [
            ((engine.name, *(engine.labels.get(name, "") for name in PER_ENGINE[1:])), engine)
            for engine in self.registry.engines.values()
            if not is_part(engine.layout.dialect, engine.labels)
        ]
        often = Counter(key for key, _ in keys)
        # What a stream tells of an engine that also pushes does not change how that one is shown.
        first = Counter(key for key, engine in keys if not engine.layout.apart)
        for key, engine in keys:
            alike = (often if engine.layout.apart else first)[key]
            yield (*key[:-1], engine.id) if alike > 1 else key, engine

    def _read_metrics(self) -> None:
        """Self-metrics that are somebody's present state."""

        def of_engines(
            read: Callable[[Engine], float],
        ) -> Callable[[], list[tuple[tuple[str, ...], float]]]:
            return lambda: [(key, read(engine)) for key, engine in self._by_labels()]

        def of_streams(
            read: Callable[[Stream], float],
        ) -> Callable[[], list[tuple[tuple[str, ...], float]]]:
            return lambda: [
                ((s.id,), read(s)) for s in self.receiver.streams.values() if not s.local
            ]

        read = self.metrics.read
        read("sidestep_engine_up", of_engines(lambda engine: float(bool(engine.streams))))
        read("sidestep_engine_restarts_total", of_engines(lambda engine: engine.restarts))
        read(
            "sidestep_engine_last_seen_timestamp_seconds",
            of_engines(lambda engine: engine.last_seen),
        )
        streams = self.receiver.streams
        read(
            "sidestep_streams",
            lambda: [((), sum(s.open and not s.silent for s in streams.values()))],
        )
        read("sidestep_forward_sources", lambda: [((), self.forwarded.sources)])
        read("sidestep_items_total", lambda: [((), self.items)])
        read("sidestep_engines", lambda: [((), len(self.registry.engines))])
        read("sidestep_stream_ring_bytes", of_streams(lambda stream: _beat(stream).ring_bytes))
        read("sidestep_stream_lag_items", of_streams(_lag))
        read(
            "sidestep_stream_durable_lag_items",
            of_streams(lambda stream: stream.seq - stream.durable if self.receiver.durable else 0),
        )
        read("sidestep_stream_push_dropped_total", of_streams(lambda stream: stream.dropped))
        read("sidestep_stream_errors_total", of_streams(lambda stream: stream.errors))
        read("sidestep_folded_items_total", of_streams(lambda stream: stream.folded))
        read(
            "sidestep_series_limited_total",
            lambda: [((limit,), count) for limit, count in self.registry.limited.items()],
        )
        read("sidestep_series", lambda: [((), self.registry.series)])


def _beat(stream: Stream) -> Heartbeat:
    return stream.beat or Heartbeat(stream.incarnation, 0, 0)


def _lag(stream: Stream) -> int:
    return max(_beat(stream).head - stream.seq, 0)
