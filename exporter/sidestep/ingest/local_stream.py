"""Streams of sources in this process: their position and the engines that they feed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b

from sidestep.config.subscriptions import Subscription
from sidestep.engines.items import Item
from sidestep.errors import WireError
from sidestep.ingest.bindings import Work
from sidestep.ingest.intake import Intake
from sidestep.metrics.engine import Engine
from sidestep.protocol.limits import MAX_LABEL_CHARS
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.progress import Progress
from sidestep.protocol.stream import StreamState

DIALECT = "stream"
MAX_FED = 64
"""Engines of one publisher; a well-behaved publisher has one rank, so one engine."""


def identity(dialect: str, *parts: str) -> str:
    """Return the identity of an engine that a source feeds."""
    name = "/".join((dialect, *parts))
    if len(name) > MAX_LABEL_CHARS:
        name = f"{dialect}/{blake2b(name.encode(), digest_size=16).hexdigest()}"
    return name


class Feed:
    """Stream of one source in this process, as the source uses it; ``name`` is stable over restarts."""

    def __init__(self, intake: Intake, name: str) -> None:
        self.intake, self.name = intake, name
        incarnation = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
        self._stream = intake.receiver.attach(name, incarnation)

    @property
    def seq(self) -> int:
        """Sequence number of the last accepted message."""
        return self._stream.seq

    @property
    def mark(self) -> Sequence[int]:
        """Further state to resume from; empty before the first message."""
        return self._stream.mark

    def record_position(self, seq: int, *mark: int) -> None:
        """Record the position of the stream."""
        self._stream.seq, self._stream.mark = seq, list(mark)
        self.intake.receiver.changes += 1

    def enqueue(self, work: Work) -> None:
        """Queue ``work`` behind the items of engines; the log names its errors after this source."""
        self.intake.enqueue(work, self.name)

    def reject(self, reason: str, count: int = 1) -> None:
        """Count rejected messages, or parts of them, by ``reason``; the log names this source."""
        self.intake.reject(reason, count, f"a message of {self.name}")

    def is_fed(self, engine: Engine) -> bool:
        """Return whether the stream feeds ``engine``; after a long silence it does not."""
        return self._stream.incarnation in engine.feeds.streams


class ServerFeed(Feed):
    """Stream of a poller: one server and its model versions as engines."""

    def __init__(self, intake: Intake, name: str) -> None:
        super().__init__(intake, name)
        self._engines: dict[str, Engine] = {}

    @property
    def engines(self) -> Mapping[str, EngineInfo]:
        """Engines of the stream by identity, including those from a snapshot."""
        return {info.id: info for info in self._stream.engines}

    def apply(self, info: EngineInfo, item: Item, *, is_answer: bool = True) -> None:
        """Apply ``item`` to the engine of ``info``, binding the engine if needed.

        Unless it ``is_answer``, the item is about the server and not from it.

        Raises:
            WireError: The engine is over a limit, or the item contradicts itself.
        """
        engine = self._engines.get(info.id)
        registered = self.intake.registry.engines.get(info.id)
        # An unreachable server also gets items; they must not mark it as up.
        if (
            engine is None
            or engine is not registered
            or not (self.is_fed(engine) or self._stream.silent)
        ):
            engine = self._engines[info.id] = self.intake.bindings.bind(self._stream, info)
        engine.feeds.seen_at = max(engine.feeds.seen_at, item.stamp)
        engine.live = True
        self.intake.put(engine, item, is_answer=is_answer)

    def report(self, engine: str, progress: Progress, now: float) -> None:
        """Report the progress of ``engine``, unless it is not bound."""
        known = self._engines.get(engine)
        if known is not None and self.is_fed(known):
            role = self.engines[engine].role
            self.intake.health.report(self._stream, [(known, role, progress)], now)

    def unbind(self, engine: str) -> None:
        """Stop feeding ``engine``."""
        self._engines.pop(engine, None)
        self.intake.bindings.unbind(self._stream, engine)

    def mark_seen(self, now: float) -> None:
        """Record that the server answered; resume its engines after a silence."""
        self._stream.seen_at = now
        if self._stream.silent:
            self._stream.silent = False
            for info in self._stream.engines:
                self.enqueue(partial(self._bind_again, info))

    def mark_answered(self, now: float) -> None:
        """Record that the server sent statistics."""
        self._stream.unanswered = False
        self.mark_seen(now)

    def mark_stale(self) -> None:
        """Mark the gauges of all engines as stale: the server has not answered for long."""
        self._stream.unanswered = True
        for engine in self._engines.values():
            engine.live = False
            self.intake.registry.touch(engine)

    def detach(self, now: float) -> None:
        """Detach the stream: the server is unreachable."""
        self.intake.bindings.mark_silent(self._stream, now)

    def _bind_again(self, info: EngineInfo) -> None:
        """Bind the engine of ``info`` again unless it has left or is already bound."""
        known = self._engines.get(info.id)
        if info.id in self.engines and (known is None or not self.is_fed(known)):
            self._engines[info.id] = self.intake.bindings.bind(self._stream, info)


class RankFeed(Feed):
    """Stream of a subscription: each rank of the publisher is an engine, which gets ``feature``."""

    def __init__(self, intake: Intake, subscription: Subscription, feature: str) -> None:
        super().__init__(intake, subscription.name)
        self.subscription = subscription
        self._feature = feature
        self._engines: dict[str, Engine] = {}

    @property
    def engines(self) -> Sequence[Engine]:
        """Engines that the stream feeds."""
        return list(self._engines.values())

    def check(self) -> None:
        """Check that the subscription's engines can be registered."""
        self.intake.registry.check(self._info("0"))

    def mark_seen(self, now: float) -> None:
        """Record that the publisher sent data; resume its engines after a silence."""
        self._stream.seen_at = now
        if self._stream.silent:
            self._stream.silent = False
            for info in self._stream.engines:
                label = info.labels["engine"]
                if info.id == self._info(label).id:
                    self._bind_again(label)

    def engine(self, rank: int | None) -> Engine:
        """Return the engine of a message, by its configured label or the rank in the message.

        Raises:
            WireError: The engine is over a limit, or belongs to another publisher.
        """
        one = self.subscription
        label = one.engine or str(one.rank if rank is None else rank)
        engine = self._engines.get(label)
        if engine is not None and self.is_fed(engine):
            return engine
        return self._bind(label)

    def _bind(self, label: str) -> Engine:
        if label not in self._engines and len(self._engines) >= MAX_FED:
            raise WireError("over_limit", "one publisher names too many ranks")
        info = self._info(label)
        engines = self.intake.registry.engines
        known = engines.get(info.id)
        if known is not None and any(map(known.feeds.streams.__contains__, self._rivals())):
            raise WireError("engine_conflict", f"another {self.subscription.kind} names {info.id}")
        engine = self._engines[label] = self.intake.bindings.bind(self._stream, info)
        # The old stamp may come from the clock of another process.
        engine.gauge_stamp = 0.0
        return engine

    def _bind_again(self, label: str) -> None:
        try:
            self._bind(label)
        except WireError as error:
            self.reject(error.reason)

    def _rivals(self) -> list[int]:
        kind = f"{self.subscription.kind} "
        return [
            stream.incarnation
            for stream in self.intake.receiver.streams.values()
            if stream.state is StreamState.LOCAL
            and stream is not self._stream
            and stream.id.startswith(kind)
        ]

    def _info(self, label: str) -> EngineInfo:
        model, more = self.subscription.model, self.subscription.labels
        name = identity(DIALECT, model, label, *(f"{key}={value}" for key, value in more))
        labels = {"engine": label, "model_name": model, **dict(more)}
        known = self.intake.registry.find(name)
        features = {self._feature} | (known.description.features if known is not None else set())
        return EngineInfo(name, DIALECT, labels, features=sorted(features))
