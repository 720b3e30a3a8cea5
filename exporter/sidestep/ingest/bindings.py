"""Bindings of streams to the engines that they feed, and streams that have gone silent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from sidestep.errors import WireError
from sidestep.metrics.description_limits import check_engines, excess
from sidestep.metrics.engine import Engine
from sidestep.metrics.exposed_engines import ENGINE_EXPIRES_SECONDS, GAUGES_EXPIRE_SECONDS
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import CORE, FRONT_END, FRONT_END_STATS, EngineInfo, Hello
from sidestep.protocol.receiver import MAX_STREAMS, Receiver
from sidestep.protocol.stream import Stream, StreamState

Work = Callable[[], None]

_OPEN = StreamState.OPEN
FRONT_END_WAIT = 3.0
"""Seconds for which a new core waits for its front ends, which reconnect within 1.25 s."""


class EngineBindings:
    """Bindings of streams to the engines that they feed.

    Attributes:
        engines: Engines by incarnation; an item's engine index is a position in the list.
    """

    def __init__(self, registry: Registry, receiver: Receiver) -> None:
        self._registry = registry
        self._receiver = receiver
        self.engines: dict[int, list[Engine]] = {}
        self._waiting: dict[int, float] = {}
        """By incarnation of a core that waits for its front ends: when its first Hello arrived."""

    def check(self, hello: Hello) -> None:
        """Check that the engines of ``hello`` can be registered."""
        streams = self._receiver.streams.values()
        named = sum(len(stream.engines) for stream in streams if stream.id != hello.stream)
        check_engines(self._registry, named, hello.engines)

    def must_wait(self, hello: Hello, now: float) -> bool:
        """Return whether a core's ``hello`` is to be repeated later, when front ends are known (R9).

        A front end that is known before the core's first item owns the latencies that users see.
        After an outage both send items of the same requests.
        """
        known = self._receiver.streams.get(hello.stream)
        if known is not None and known.incarnation == hello.incarnation:
            return False
        if not any(self._lacks_front_end(info) for info in hello.engines):
            return False
        if len(self._waiting) >= MAX_STREAMS:
            del self._waiting[next(iter(self._waiting))]
        since = self._waiting.setdefault(hello.incarnation, now)
        return now - since < FRONT_END_WAIT

    def _lacks_front_end(self, info: EngineInfo) -> bool:
        """Return whether a core names ``info``, whose front ends may connect and have not yet."""
        engine = self._registry.find(info.id)
        is_expected = info.role == CORE and FRONT_END_STATS in info.features
        return is_expected and (
            engine is None or not any(map(self._is_active, engine.feeds.front_ends))
        )

    def _is_active(self, name: str) -> bool:
        stream = self._receiver.streams.get(name)
        return stream is not None and stream.state is not StreamState.CLOSED and not stream.silent

    def restore(self, stream: Stream) -> None:
        """Restore the roles of ``stream``, which is from a snapshot, for its engines."""
        for info in stream.engines:
            engine = self._registry.find(info.id)
            if engine is None:
                continue
            if info.role == CORE:
                engine.feeds.lost_cores.add(stream.id)
            elif info.role == FRONT_END:
                engine.feeds.front_ends.add(stream.id)

    def attach(self, stream: Stream, retired: int | None, now: float) -> list[Work]:
        """Return the work that binds the engines of ``stream``: one call per engine, each in a slice of its own."""
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

    def note_backlog(self, stream: Stream, *, has_items: bool, now: float) -> None:
        """Note that the engines of ``stream`` fall behind, since it has delivered items, or have caught up."""
        if not has_items:
            self._catch_up(stream, now)
            return
        for engine in self.engines[stream.incarnation]:
            engine.feeds.caught_up_at = math.nan

    def _catch_up(self, stream: Stream, now: float) -> None:
        behind = [e for e in self.engines[stream.incarnation] if math.isnan(e.feeds.caught_up_at)]
        if not behind:
            return
        streams = self._receiver.streams.values()
        delivering = {s.incarnation for s in streams if s.state is _OPEN and not s.caught_up}
        for engine in behind:
            if not engine.feeds.streams & delivering:
                engine.feeds.caught_up_at = now

    def resume(self, stream: Stream) -> None:
        """Bind a silent stream to its engines again."""
        stream.silent = False
        # Meanwhile another process may have registered one of them with other labels.
        registered = self._registry.engines
        engines = [registered.get(e.id, e) for e in self.engines[stream.incarnation]]
        self.engines[stream.incarnation] = engines
        for engine, info in zip(engines, stream.engines, strict=False):
            self._feed(stream, engine, info.role)

    def bind(self, stream: Stream, info: EngineInfo) -> Engine:
        """Bind a stream of this process to the engine of ``info`` and return the engine."""
        named = sum(len(each.engines) for each in self._receiver.streams.values())
        check_engines(self._registry, named, [info])
        engine = self._registered(info)
        fed = self.engines.setdefault(stream.incarnation, [])
        # The engine may have expired and been registered again as a new object.
        fed[:] = [*(each for each in fed if each.id != engine.id), engine]
        stream.engines = [*(each for each in stream.engines if each.id != info.id), info]
        self._receiver.changes += 1
        self._feed(stream, engine, info.role)
        engine.feeds.caught_up_at = math.nan
        return engine

    def unbind(self, stream: Stream, identity: str) -> None:
        """Unbind a stream of this process from the engine with this identity."""
        stream.engines = [info for info in stream.engines if info.id != identity]
        self._receiver.changes += 1
        fed = self.engines.get(stream.incarnation, [])
        for engine in fed:
            if engine.id == identity:
                engine.feeds.remove(stream.incarnation, stream.seen_at)
                self._registry.touch(engine)
        fed[:] = [engine for engine in fed if engine.id != identity]

    def mark_silent(self, stream: Stream, seen_at: float) -> None:
        """Detach ``stream``, last seen at ``seen_at``, until its next message."""
        stream.silent = True
        self.detach(stream, seen_at)

    def detach(self, stream: Stream, seen_at: float) -> None:
        """Detach ``stream`` from its engines as of ``seen_at``."""
        for engine in self.engines.get(stream.incarnation, ()):
            engine.feeds.remove(stream.incarnation, seen_at)
        for info in stream.engines:
            if info.role == CORE and (core := self._registry.find(info.id)) is not None:
                core.feeds.lost_cores.add(stream.id)

    def expire(self, now: float) -> None:
        """Detach silent streams and drop the bindings of expired ones."""
        for stream in self._receiver.streams.values():
            is_quiet = now - stream.seen_at >= GAUGES_EXPIRE_SECONDS
            if is_quiet and not stream.silent and stream.state is not StreamState.CLOSED:
                self.mark_silent(stream, stream.seen_at)
            if now - stream.seen_at >= ENGINE_EXPIRES_SECONDS:
                self._forget_front_end(stream)
                # Its engines have expired: the stream needs a new Hello to feed any.
                self._remove(stream.incarnation, stream.seen_at)
                self._receiver.detach(stream)

    def _forget_front_end(self, stream: Stream) -> None:
        """Count the latencies of the core again, since the front end sends none any more."""
        for info in stream.engines:
            engine = self._registry.find(info.id)
            if engine is not None and info.role == FRONT_END:
                engine.feeds.front_ends.discard(stream.id)

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
            if info.role == CORE:
                # The others belonged to the core's previous process, which may have sent items after them.
                engine.feeds.front_ends = set(filter(self._is_active, engine.feeds.front_ends))
        engine.feeds.contested = stream.replica > 1
        self._feed(stream, engine, info.role)
        engines.append(engine)

    def _bound(self, stream: Stream, before: Sequence[Engine], now: float) -> None:
        """Detach the stream from the engines that it named ``before`` and no longer names."""
        fed = set(self.engines.get(stream.incarnation, ()))
        for engine in before:
            if engine not in fed:
                engine.feeds.remove(stream.incarnation, now)
        # Drop the bindings of streams that the receiver has forgotten.
        known = {stream.incarnation for stream in self._receiver.streams.values()}
        for incarnation in self.engines.keys() - known:
            self._remove(incarnation, now)

    def _registered(self, info: EngineInfo) -> Engine:
        engine = self._registry.register(info)
        engine.description.excess_bytes = excess(self._registry, info)
        return engine

    def _feed(self, stream: Stream, engine: Engine, role: str) -> None:
        engine.feeds.streams.add(stream.incarnation)
        if role == CORE:
            engine.feeds.lost_cores.discard(stream.id)
        elif role == FRONT_END:
            engine.feeds.front_ends.add(stream.id)
        # Without its core, an engine's gauges have their last values.
        engine.live = engine.live or engine.is_up
        self._registry.touch(engine)

    def _remove(self, incarnation: int, now: float) -> None:
        for engine in self.engines.pop(incarnation, ()):
            engine.feeds.remove(incarnation, now)
