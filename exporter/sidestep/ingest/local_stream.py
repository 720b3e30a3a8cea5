"""A source's way in: its stream, where it stopped, and the engines that it feeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b

from sidestep.config.subscriptions import Subscription
from sidestep.engines.items import Item
from sidestep.errors import WireError
from sidestep.ingest.intake import Intake
from sidestep.metrics.engine import Engine
from sidestep.protocol.limits import MAX_LABEL_CHARS
from sidestep.protocol.messages import EngineInfo

DIALECT = "stream"
MAX_FED = 64
"""Engines of one publisher, which has one: a rank that changes is a lie."""


class Feed:
    """What one source in this process knows of the intake, and says to it.

    Args:
        name: Of its stream, the same each time.

    Attributes:
        intake: Where work and refusals go.
    """

    def __init__(self, intake: Intake, name: str) -> None:
        self.intake = intake
        incarnation = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
        self._stream = intake.receiver.attach(name, incarnation)

    @property
    def seq(self) -> int:
        """The number of the last message that was taken."""
        return self._stream.seq

    @property
    def mark(self) -> Sequence[int]:
        """What else to go on with; empty before any message."""
        return self._stream.mark

    def took(self, seq: int, *mark: int) -> None:
        """Remember how far the stream is taken."""
        self._stream.seq, self._stream.mark = seq, list(mark)
        self.intake.receiver.changes += 1

    def put(self, engine: Engine, item: Item) -> None:
        """Apply ``item``.

        Raises:
            WireError: It contradicts the catalogue or itself; nothing was changed.
        """
        self.intake.put(engine, item)

    def is_fed(self, engine: Engine) -> bool:
        """Whether the stream feeds ``engine``: after a long silence it does not."""
        return self._stream.incarnation in engine.streams


class ServerFeed(Feed):
    """The way in of a poller: a server, and the versions of its models."""

    def __init__(self, intake: Intake, name: str) -> None:
        super().__init__(intake, name)
        self._engines: dict[str, Engine] = {}

    @property
    def engines(self) -> Mapping[str, EngineInfo]:
        """Those that it feeds by their identities, a snapshot's among them."""
        return {info.id: info for info in self._stream.engines}

    def tell(self, info: EngineInfo, item: Item) -> None:
        """Apply ``item`` to the engine that ``info`` names.

        Raises:
            WireError: It cannot be shown, or the item contradicts itself.
        """
        engine = self._engines.get(info.id)
        shown = self.intake.registry.engines.get(info.id)
        # A server that is not there is told of, too, and is not up for that.
        if (
            engine is None
            or engine is not shown
            or not (self.is_fed(engine) or self._stream.silent)
        ):
            engine = self._engines[info.id] = self.intake.feeding.join(self._stream, info)
        engine.seen_at = max(engine.seen_at, item.stamp)
        engine.live = True
        self.intake.put(engine, item)

    def leave(self, engine: str) -> None:
        """Feed ``engine`` no more."""
        self._engines.pop(engine, None)
        self.intake.feeding.part(self._stream, engine)

    def heard(self, now: float) -> None:
        """The server is there, and whatever it had."""
        self._stream.heard = now
        if self._stream.silent:
            self._stream.silent = False
            for info in self._stream.engines:
                self.intake.enqueue(partial(self._bind_again, info))

    def doubt(self) -> None:
        """It has not answered for long: what its gauges say may not be true any more."""
        for engine in self._engines.values():
            engine.live = False
            self.intake.registry.touch(engine)

    def lost(self, now: float) -> None:
        """It is not there."""
        self.intake.feeding.silence(self._stream, now)

    def _bind_again(self, info: EngineInfo) -> None:
        """It may have left meanwhile, or been told of."""
        known = self._engines.get(info.id)
        if info.id in self.engines and (known is None or not self.is_fed(known)):
            self._engines[info.id] = self.intake.feeding.join(self._stream, info)


class RankFeed(Feed):
    """The way in of a subscription: the rank that a publisher is.

    Args:
        feature: What its engines have from it.
    """

    def __init__(self, intake: Intake, subscription: Subscription, feature: str) -> None:
        super().__init__(intake, subscription.name)
        self.subscription = subscription
        self._feature = feature
        self._engines: dict[str, Engine] = {}

    @property
    def engines(self) -> Sequence[Engine]:
        """Those that it feeds."""
        return list(self._engines.values())

    def check(self) -> None:
        """Whether its engines can be shown.

        Raises:
            WireError: They cannot.
        """
        self.intake.registry.check(self._info("0"))

    def heard(self, now: float) -> None:
        """The publisher is there."""
        self._stream.heard = now
        if self._stream.silent:
            self._stream.silent = False
            for info in self._stream.engines:
                label = info.labels["engine"]
                if info.id == self._info(label).id:
                    self._bind_again(label)

    def engine(self, label: str) -> Engine:
        """The engine that the publisher's rank ``label`` is, unless its label is given.

        Raises:
            WireError: It cannot be shown, or is another publisher's.
        """
        label = self.subscription.engine or label
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
        if known is not None and any(map(known.streams.__contains__, self._rivals())):
            raise WireError("engine_conflict", f"another {self.subscription.kind} names {info.id}")
        engine = self._engines[label] = self.intake.feeding.join(self._stream, info)
        # Of this process's clock, or of another's that is over.
        engine.gauge_stamp = 0.0
        return engine

    def _bind_again(self, label: str) -> None:
        try:
            self._bind(label)
        except WireError as error:
            self.intake.reject(error.reason)

    def _rivals(self) -> list[int]:
        """Incarnations of the other streams of its kind."""
        kind = f"{self.subscription.kind} "
        return [
            stream.incarnation
            for stream in self.intake.receiver.streams.values()
            if stream.local and stream is not self._stream and stream.id.startswith(kind)
        ]

    def _info(self, label: str) -> EngineInfo:
        model, more = self.subscription.model, self.subscription.labels
        name = "/".join((DIALECT, model, label, *(f"{key}={value}" for key, value in more)))
        if len(name) > MAX_LABEL_CHARS:
            name = f"{DIALECT}/{blake2b(name.encode(), digest_size=16).hexdigest()}"
        labels = {"engine": label, "model_name": model, **dict(more)}
        known = self.intake.registry.engines.get(name) or self.intake.registry.retired.get(name)
        features = {self._feature} | (known.features if known is not None else set())
        return EngineInfo(name, DIALECT, labels, features=sorted(features))
