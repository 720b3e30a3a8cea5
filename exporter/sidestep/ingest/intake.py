"""What becomes of a frame: decode, session, apply. All of an exporter but its socket and its pages.

No I/O here, and no clock: whoever owns the socket brings frames and the time, asks
for a slice of work at a time, and sends the answers. Whatever is wrong with a frame or
an item is counted by reason and costs itself.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from sidestep.engines.apply import Applier
from sidestep.engines.items import Item, decode_item
from sidestep.errors import WireError
from sidestep.federation.lives import new_life
from sidestep.federation.messages import is_forward
from sidestep.federation.receiver import Hearsay, Replies
from sidestep.federation.store import Forwarded
from sidestep.ingest.bindings import Feeding, Work
from sidestep.ingest.engine_metrics import read_metrics
from sidestep.metrics.engine import Engine
from sidestep.metrics.load_inputs import LoadTracker
from sidestep.metrics.record_codec import decode_record
from sidestep.metrics.registry import Registry
from sidestep.protocol.limits import MAX_ITEM_BYTES
from sidestep.protocol.messages import FromSender, Hello, decode_from_sender
from sidestep.protocol.receiver import Receiver, Stream
from sidestep.telemetry.logs import Limited
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.guard import Guard

log = logging.getLogger(__name__)

MANY = 4
"""Items of an engine in one frame from which on it is worth while to gather what they observe."""
PART = 8 << 10
"""Bytes of small items that are applied in one go: 0.3 ms; at worst what one dear item takes."""

WAITING = 16 << 10
"""Bytes of items whose observations may wait: to make those takes up to 1 ms, of the same turn."""


class Intake:
    """Takes frames, and has the state that they come to.

    Args:
        wall: Unix time, told to people only.
        guard: Knows who may say what; by default everybody may say everything.
        merge: Whether engines of one identity are one, whichever exporter forwards them.

    Attributes:
        feeding: Which streams feed which engines.
        forwarded: Engines that other exporters count.
        loads: Follows how saturated those are that are counted here.
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
        self.loads = LoadTracker(registry)
        self._hearsay = Hearsay(self.forwarded, self.receiver, metrics, clock)
        self.life, self.run = new_life(wall(), boot), 1
        self._clock, self._wall = clock, wall
        self.feeding = Feeding(registry, self.receiver)
        self._work: deque[Work] = deque()
        self._waiting = 0
        """Bytes of items whose observations are not made yet."""
        self._arrived = 0.0
        """Unix time of the frame whose items are being applied."""
        self._bugs = Limited(log, clock=clock)
        read_metrics(metrics, registry, self.receiver)
        metrics.read("sidestep_forward_sources", lambda: [((), self.forwarded.sources)])
        metrics.read("sidestep_items_total", lambda: [((), self.items)])

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
                self.feeding.check(message)
                self.guard.admit(key, message, self.receiver.streams.get)
            except WireError as error:
                refusal = self.receiver.refuse_hello(peer, message, error)
                return [*self._refuse(error.reason), *refusal.replies]
        return self._receive(peer, message, frames[0], now)

    def _receive(self, peer: bytes, message: FromSender, frame: bytes, now: float) -> Replies:
        received = self.receiver.receive(peer, message, now, len(frame))
        self.metrics.add("sidestep_duplicates_total", received.duplicates)
        self.metrics.add("sidestep_lost_items_total", received.lost)
        stream = received.stream
        if stream is None:
            return received.replies
        if received.greeted:
            self._work.extend(self.feeding.greet(stream, received.retired, now))
        elif stream.silent:
            self.feeding.wake(stream)
        self._arrived = self._wall()
        engines = self.feeding.engines[stream.incarnation]
        raws = self._sized(frame, received.items)
        if raws:
            # The next one last, where it is cheap to take away.
            self._work.append(partial(self._apply_items, engines, [*raws][::-1], len(raws)))
        self._work.extend(partial(self._add_record, engines, raw) for raw in received.records)
        if not stream.open:
            self.feeding.cease(stream, now)
        return received.replies

    def _take_forward(self, peer: bytes, frame: bytes, now: float, key: str) -> Replies:
        try:
            steps = self._hearsay.take(self.guard, peer, frame, now, key)
        except WireError as error:
            return self._refuse(error.reason)
        if steps is not None:
            self._begin(steps)
        return []

    def unix_of(self, moment: float) -> float:
        """The Unix time of a monotonic ``moment`` of this process, for one that follows it."""
        return self._wall() - (self._clock() - moment)

    def moment_of(self, unix: float, now: float) -> float:
        """The monotonic moment of the Unix time ``unix`` that a former process noted; not after ``now``."""
        return now - max(self._wall() - unix, 0.0)

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
                self.applier.flush()
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

    def put(self, engine: Engine, item: Item) -> None:
        """Apply an item of a stream of this process.

        Raises:
            WireError: See ``Applier.apply``.
        """
        self.applier.apply(engine, item)
        self._arrived = self._wall()
        self._applied(engine)

    def pass_time(self, now: float) -> None:
        """Notice who has fallen silent; about once a second."""
        self.feeding.pass_time(now)
        self._begin(self._hearsay.pass_time(now))
        self.registry.expire(now)

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
                if are_many and self.applier.apply_buffered(engine, item):
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
        moved = self.applier.add_record(engine, record)
        self.metrics.add("sidestep_rebucketed_observations_total", moved)
        self._applied(engine)

    def _applied(self, engine: Engine) -> None:
        engine.last_seen = self._arrived
        self.items += 1

    def _sized(self, frame: bytes, items: Sequence[msgspec.Raw]) -> Sequence[msgspec.Raw]:
        """``items`` without those over the limit, which only a large frame can hold."""
        if len(frame) <= MAX_ITEM_BYTES:
            return items
        kept = [raw for raw in items if len(raw) <= MAX_ITEM_BYTES]
        for _ in range(len(items) - len(kept)):
            self.reject("too_big")
        return kept

    def _refuse(self, reason: str) -> Replies:
        self.refused += 1
        self.reject(reason)
        return []
