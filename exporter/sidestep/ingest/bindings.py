"""Bindings of streams to engines: engine indices of items, and streams that have gone silent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from sidestep.errors import WireError
from sidestep.metrics.description_limits import check as check_engines
from sidestep.metrics.description_limits import excess
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS, GAUGES_EXPIRE_SECONDS, Registry
from sidestep.protocol.messages import EngineInfo, Hello
from sidestep.protocol.receiver import Receiver, Stream

Work = Callable[[], None]


class EngineBindings:
    """Bindings of streams to the engines that they feed.

    Attributes:
        engines: Engines by incarnation; an item's engine index is a position in the list.
    """

    def __init__(self, registry: Registry, receiver: Receiver) -> None:
        self._registry = registry
        self._receiver = receiver
        self.engines: dict[int, list[Engine]] = {}

    def check(self, hello: Hello) -> None:
        """Check that the engines of ``hello`` can be registered.

        Raises:
            WireError: They are malformed or over a limit.
        """
        streams = self._receiver.streams.values()
        named = sum(len(stream.engines) for stream in streams if stream.id != hello.stream)
        check_engines(self._registry, named, hello.engines)

    def attach(self, stream: Stream, retired: int | None, now: float) -> list[Work]:
        """Return the work that binds the engines of ``stream``, one call per engine.

        A stream can have hundreds of engines, so the calls run in separate slices.
        """
        if retired is not None:
            self._remove(retired, now)
        # Engines of this incarnation's previous Hello; None if this exporter has had none.
        named = self.engines.get(stream.incarnation)
        before = [] if named is None else named
        engines = self.engines[stream.incarnation] = []
        stream.silent = False

        def is_new(engine: Engine) -> bool:
            """Return whether this process has replaced the engine's previous one."""
            if retired is not None or named is None:
                return retired is not None
            # A process may discover some of its engines only after its first Hello.
            return bool(stream.retired and engine.last_seen) and engine not in named

        works: list[Work] = [
            partial(self._bind, stream, info, engines, index, is_new)
            for index, info in enumerate(stream.engines)
        ]
        return [*works, partial(self._bound, stream, before, now)]

    def resume(self, stream: Stream) -> None:
        """Bind a silent stream to its engines again."""
        stream.silent = False
        # Meanwhile another process may have registered one of them with other labels.
        registered = self._registry.engines
        engines = [registered.get(e.id, e) for e in self.engines[stream.incarnation]]
        self.engines[stream.incarnation] = engines
        for engine in engines:
            self._feed(stream, engine)

    def bind(self, stream: Stream, info: EngineInfo) -> Engine:
        """Bind a stream of this process to the engine of ``info`` and return the engine.

        Raises:
            WireError: The engine is malformed or over a limit.
        """
        named = sum(len(each.engines) for each in self._receiver.streams.values())
        check_engines(self._registry, named, [info])
        engine = self._registered(info)
        fed = self.engines.setdefault(stream.incarnation, [])
        # The engine may have expired and been registered again as a new object.
        fed[:] = [*(each for each in fed if each.id != engine.id), engine]
        stream.engines = [*(each for each in stream.engines if each.id != info.id), info]
        self._receiver.changes += 1
        self._feed(stream, engine)
        return engine

    def unbind(self, stream: Stream, identity: str) -> None:
        """Unbind a stream of this process from the engine with this identity."""
        stream.engines = [info for info in stream.engines if info.id != identity]
        self._receiver.changes += 1
        fed = self.engines.get(stream.incarnation, [])
        for engine in fed:
            if engine.id == identity:
                engine.streams.discard(stream.incarnation)
                engine.seen_at = max(engine.seen_at, stream.seen_at)
                self._registry.touch(engine)
        fed[:] = [engine for engine in fed if engine.id != identity]

    def mark_silent(self, stream: Stream, seen_at: float) -> None:
        """Detach ``stream``, last seen at ``seen_at``, until its next message."""
        stream.silent = True
        self.detach(stream, seen_at)

    def detach(self, stream: Stream, seen_at: float) -> None:
        """Detach ``stream`` from its engines as of ``seen_at``."""
        for engine in self.engines.get(stream.incarnation, ()):
            engine.streams.discard(stream.incarnation)
            engine.seen_at = max(engine.seen_at, seen_at)

    def expire(self, now: float) -> None:
        """Detach silent streams and drop the bindings of expired ones."""
        for stream in self._receiver.streams.values():
            if stream.open and not stream.silent and now - stream.seen_at >= GAUGES_EXPIRE_SECONDS:
                self.mark_silent(stream, stream.seen_at)
            if (
                stream.incarnation in self.engines
                and now - stream.seen_at >= ENGINE_EXPIRES_SECONDS
            ):
                # Its engines have expired: the stream needs a new Hello to feed any.
                self._remove(stream.incarnation, stream.seen_at)
                stream.peer = b""

    def _bind(
        self,
        stream: Stream,
        info: EngineInfo,
        engines: list[Engine],
        index: int,
        is_new: Callable[[Engine], bool],
    ) -> None:
        """Append the engine of ``info`` to ``engines``; ``is_new`` detects a restarted engine."""
        if len(engines) < index:
            # An earlier one failed; without this check the indices would be shifted.
            raise WireError("unknown_engine")
        engine = self._registered(info)
        if is_new(engine):
            engine.restarts += 1
            self._registry.reset_gauges(engine)
        self._feed(stream, engine)
        engines.append(engine)

    def _bound(self, stream: Stream, before: Sequence[Engine], now: float) -> None:
        """Detach the stream from the engines that it named ``before`` and no longer names."""
        fed = set(self.engines.get(stream.incarnation, ()))
        for engine in before:
            if engine not in fed:
                engine.streams.discard(stream.incarnation)
                engine.seen_at = max(engine.seen_at, now)
        # Drop the bindings of streams that the receiver has forgotten.
        known = {stream.incarnation for stream in self._receiver.streams.values()}
        for incarnation in self.engines.keys() - known:
            self._remove(incarnation, now)

    def _registered(self, info: EngineInfo) -> Engine:
        engine = self._registry.register(info)
        engine.excess_bytes = excess(self._registry, info)
        return engine

    def _feed(self, stream: Stream, engine: Engine) -> None:
        engine.streams.add(stream.incarnation)
        engine.live = True
        self._registry.touch(engine)

    def _remove(self, incarnation: int, now: float) -> None:
        for engine in self.engines.pop(incarnation, ()):
            engine.streams.discard(incarnation)
            engine.seen_at = max(engine.seen_at, now)
