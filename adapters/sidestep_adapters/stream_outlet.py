"""A poller's way out to an exporter in another process: streams, as engines have them.

A stream names its engines in its Hello and items name them by their place in it. A place must
not mean another engine while items that were told under it may still be on their way, so an
engine leaves in two steps: once all that was said is safe, its name goes, and once the exporter
has taken that, it may come back under other labels.

The exporter knows streams alone. That the server is lost or has not answered for long is said by
naming its engines no more: their gauges go after the silence after which any engine's do. What is
polled of the server itself is told on, so that its state is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from sidestep.wire.items import Item
from sidestep.wire.limits import MAX_ENGINES_PER_STREAM
from sidestep.wire.messages import EngineInfo
from sidestep_adapters.push import Publisher

Publish = Callable[[int, Sequence[EngineInfo]], Publisher]
"""Makes the stream of a number, which names these engines at first."""


class StreamOutlet:
    """An ``Outlet`` over as many streams as it takes; used in one event loop.

    Args:
        server: The engine that the server itself is; it never leaves.
        publish: Makes streams.
    """

    def __init__(self, server: EngineInfo, publish: Publish) -> None:
        self._server = server
        self._publish = publish
        self._streams: list[_Stream] = []
        self._of: dict[str, _Stream] = {}
        """By engine."""
        self._open([server])

    @property
    def engines(self) -> Mapping[str, EngineInfo]:
        """Those that it feeds."""
        return {engine: info for each in self._streams for engine, info in each.named.items()}

    @property
    def publishers(self) -> list[Publisher]:
        """Of its streams."""
        return [stream.publisher for stream in self._streams]

    def tell(self, info: EngineInfo, item: Item) -> None:
        """Send ``item`` to the engine that ``info`` names.

        Looks are absolute: one that is left out since its engine is still known under other
        labels is in the next one.
        """
        stream = self._of.get(info.id)
        if stream is None:
            stream = self._of[info.id] = self._stream_with_room()
        stream.tell(info, item)

    def leave(self, engine: str) -> None:
        """Feed ``engine`` no more."""
        if engine in self._of:
            self._of[engine].leave([engine])

    def heard(self, now: float) -> None:
        """The server is there: what it has is told of anyway."""

    def doubt(self) -> None:
        """It has not answered for long."""
        for stream in self._streams:
            stream.leave([engine for engine in stream.named if engine != self._server.id])

    def lost(self, now: float) -> None:  # noqa: ARG002 - the exporter has a clock of its own
        """It is not there."""
        self.doubt()

    def _stream_with_room(self) -> _Stream:
        for stream in self._streams:
            if stream.has_room:
                return stream
        return self._open([])

    def _open(self, infos: Sequence[EngineInfo]) -> _Stream:
        publisher = self._publish(len(self._streams), infos)
        made = _Stream(publisher, infos, self._server, lambda engine: self._of.pop(engine, None))
        self._streams.append(made)
        self._of |= dict.fromkeys(made.named, made)
        return made


class _Stream:
    """One stream, and which engine each of its places means.

    Args:
        infos: The engines that it names already.
        placeholder: The engine in places that are free.
        gone: Called for an engine that may be told of anywhere again.
    """

    def __init__(
        self,
        publisher: Publisher,
        infos: Sequence[EngineInfo],
        placeholder: EngineInfo,
        gone: Callable[[str], object],
    ) -> None:
        self.publisher = publisher
        self.named = {info.id: info for info in infos}
        self._placeholder = placeholder
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._infos = list(infos)
        self._places = {info.id: place for place, info in enumerate(infos)}
        """Of engines that are named, or were until everything about them is safe."""
        self._free: list[int] = []
        self._leaving: dict[str, object] = {}
        """A token for each time that an engine leaves: it may have come back meanwhile."""

    @property
    def has_room(self) -> bool:
        """Whether one engine more can be told of."""
        return bool(self._free) or len(self._infos) < MAX_ENGINES_PER_STREAM

    def tell(self, info: EngineInfo, item: Item) -> None:
        """Send ``item``, unless the engine has to leave first."""
        if info.id in self._leaving and self.named.get(info.id) != info:
            return
        self._leaving.pop(info.id, None)
        place = self._places.get(info.id)
        if place is None:
            place = self._places[info.id] = self._take()
        if self._infos[place] != info:
            self._infos[place] = self.named[info.id] = info
            self.publisher.describe(self._infos)
        self.send(place, item)

    def send(self, place: int, item: Item) -> None:
        """Send ``item`` to the engine of that place."""
        item.engine = place
        self.publisher.push(item)

    def leave(self, engines: Sequence[str]) -> None:
        """Name them no more, once all that was said is safe."""
        token = object()
        self._leaving |= {e: token for e in engines if e in self.named and e not in self._leaving}
        self._after(partial(self._unname, token))

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._infos.append(self._placeholder)
        return len(self._infos) - 1

    def _unname(self, token: object) -> None:
        left = [engine for engine, its in self._leaving.items() if its is token]
        for engine in left:
            place = self._places.pop(engine)
            self._infos[place] = self._placeholder
            self._free.append(place)
            del self.named[engine]
        if left:
            self.publisher.describe(self._infos)
            self._after(partial(self._forget, token))

    def _forget(self, token: object) -> None:
        for engine in [engine for engine, its in self._leaving.items() if its is token]:
            del self._leaving[engine]
            self._gone(engine)

    def _after(self, then: Callable[[], None]) -> None:
        def ready() -> None:
            # The loop may have ended before the publisher.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(then)

        self.publisher.after(ready)
