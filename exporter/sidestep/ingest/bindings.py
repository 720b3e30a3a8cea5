"""Which streams feed which engines: what their items' engine indices mean, and who is still heard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from sidestep.errors import WireError
from sidestep.ingest.hello_limits import check as check_engines
from sidestep.ingest.hello_limits import excess
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS, GAUGES_EXPIRE_SECONDS, Registry
from sidestep.protocol.messages import EngineInfo, Hello
from sidestep.protocol.receiver import Receiver, Stream

Work = Callable[[], None]


class Feeding:
    """Binds streams to the engines that they name.

    Attributes:
        engines: By incarnation: what a stream's engine indices mean.
    """

    def __init__(self, registry: Registry, receiver: Receiver) -> None:
        self._registry = registry
        self._receiver = receiver
        self.engines: dict[int, list[Engine]] = {}

    def check(self, hello: Hello) -> None:
        """Whether the engines that ``hello`` names can be shown.

        Raises:
            WireError: They cannot.
        """
        streams = self._receiver.streams.values()
        named = sum(len(stream.engines) for stream in streams if stream.id != hello.stream)
        check_engines(self._registry, named, hello.engines)

    def greet(self, stream: Stream, retired: int | None, now: float) -> list[Work]:
        """Bind the stream's engine indices to engines, one at a time: hundreds take a while."""
        if retired is not None:
            self._leave(retired, now)
        # What this process named before; None where it said nothing yet, or to another exporter.
        named = self.engines.get(stream.incarnation)
        before = [] if named is None else named
        engines = self.engines[stream.incarnation] = []
        stream.silent = False

        def is_new(engine: Engine) -> bool:
            """Whether it had another process, which this one has replaced."""
            if retired is not None or named is None:
                return retired is not None
            # A process names some engines only when it hears of them itself.
            return bool(stream.retired and engine.last_seen) and engine not in named

        works: list[Work] = [
            partial(self._bind, stream, info, engines, index, is_new)
            for index, info in enumerate(stream.engines)
        ]
        return [*works, partial(self._bound, stream, before, now)]

    def wake(self, stream: Stream) -> None:
        """A silent stream is heard again."""
        stream.silent = False
        # Another process may have come with other labels for one of them meanwhile.
        there = self._registry.engines
        engines = [there.get(e.id, e) for e in self.engines[stream.incarnation]]
        self.engines[stream.incarnation] = engines
        for engine in engines:
            self._feed(stream, engine)

    def join(self, stream: Stream, info: EngineInfo) -> Engine:
        """Let a stream of this process feed the engine that ``info`` names.

        Raises:
            WireError: The engine cannot be shown.
        """
        named = sum(len(each.engines) for each in self._receiver.streams.values())
        check_engines(self._registry, named, [info])
        engine = self._registered(info)
        fed = self.engines.setdefault(stream.incarnation, [])
        # It may have been forgotten meanwhile, and be another now.
        fed[:] = [*(each for each in fed if each.id != engine.id), engine]
        stream.engines = [*(each for each in stream.engines if each.id != info.id), info]
        self._receiver.changes += 1
        self._feed(stream, engine)
        return engine

    def part(self, stream: Stream, identity: str) -> None:
        """A stream of this process feeds one of its engines no more."""
        stream.engines = [info for info in stream.engines if info.id != identity]
        self._receiver.changes += 1
        fed = self.engines.get(stream.incarnation, [])
        for engine in fed:
            if engine.id == identity:
                engine.streams.discard(stream.incarnation)
                engine.seen_at = max(engine.seen_at, stream.heard)
                self._registry.touch(engine)
        fed[:] = [engine for engine in fed if engine.id != identity]

    def silence(self, stream: Stream, heard: float) -> None:
        """Nothing was heard of ``stream`` since ``heard``: it feeds nobody until it is heard again."""
        stream.silent = True
        self.cease(stream, heard)

    def cease(self, stream: Stream, heard: float) -> None:
        """The stream does not feed its engines any more, since ``heard``."""
        for engine in self.engines.get(stream.incarnation, ()):
            engine.streams.discard(stream.incarnation)
            engine.seen_at = max(engine.seen_at, heard)

    def pass_time(self, now: float) -> None:
        """Notice which streams have fallen silent."""
        for stream in self._receiver.streams.values():
            if stream.open and not stream.silent and now - stream.heard >= GAUGES_EXPIRE_SECONDS:
                self.silence(stream, stream.heard)
            if stream.incarnation in self.engines and now - stream.heard >= ENGINE_EXPIRES_SECONDS:
                # Its engines are not shown any more: before it feeds any it has to greet.
                self._leave(stream.incarnation, stream.heard)
                stream.peer = b""

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
        engine = self._registered(info)
        if is_new(engine):
            engine.restarts += 1
            self._registry.reset_gauges(engine)
        self._feed(stream, engine)
        engines.append(engine)

    def _bound(self, stream: Stream, before: Sequence[Engine], now: float) -> None:
        """The stream feeds what it named, and not any more what it named ``before``."""
        fed = set(self.engines.get(stream.incarnation, ()))
        for engine in before:
            if engine not in fed:
                engine.streams.discard(stream.incarnation)
                engine.seen_at = max(engine.seen_at, now)
        # A stream that the receiver has forgotten has nothing more to say here either.
        known = {stream.incarnation for stream in self._receiver.streams.values()}
        for gone in self.engines.keys() - known:
            self._leave(gone, now)

    def _registered(self, info: EngineInfo) -> Engine:
        engine = self._registry.register(info)
        engine.excess_bytes = excess(self._registry, info)
        return engine

    def _feed(self, stream: Stream, engine: Engine) -> None:
        engine.streams.add(stream.incarnation)
        engine.live = True
        self._registry.touch(engine)

    def _leave(self, incarnation: int, now: float) -> None:
        for engine in self.engines.pop(incarnation, ()):
            engine.streams.discard(incarnation)
            engine.seen_at = max(engine.seen_at, now)
