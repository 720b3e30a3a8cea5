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
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from sidestep.engines.items import Item
from sidestep.protocol.limits import MAX_ENGINES_PER_STREAM
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher

Publish = Callable[[int, Sequence[EngineInfo]], Publisher]
"""Makes the stream of a number, which names these engines at first."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Leave:
    """That an engine leaves, once: it may have come back, and leave again."""

    info: EngineInfo


_Leaves = Mapping[str, _Leave]
"""By engine."""


class StreamOutlet:
    """An ``Outlet`` over as many streams as it takes; used in one event loop.

    Args:
        server: The engine that the server itself is; it stays when others leave.
        publish: Makes streams.
    """

    def __init__(self, server: EngineInfo, publish: Publish) -> None:
        self._server = server
        self._publish = publish
        self._streams: list[_Stream] = []
        self._of: dict[str, _Stream] = {}
        """By engine."""
        self._leaving: dict[str, _Leave] = {}
        """Engines that leave, until the exporter knows."""
        self._open([server])

    @property
    def engines(self) -> Mapping[str, EngineInfo]:
        """Those that it feeds."""
        return {engine: stream.info(engine) for engine, stream in self._of.items()}

    @property
    def publishers(self) -> list[Publisher]:
        """Of its streams."""
        return [stream.publisher for stream in self._streams]

    def tell(self, info: EngineInfo, item: Item) -> None:
        """Send ``item`` to the engine that ``info`` names.

        Looks are absolute: one that is left out, since the exporter still knows the engine under
        other labels, is in the next one.
        """
        leave = self._leaving.get(info.id)
        if leave is not None and leave.info != info:
            return
        self._leaving.pop(info.id, None)
        stream = self._of.get(info.id)
        if stream is None:
            stream = self._of[info.id] = self._stream_with_room()
        stream.tell(info, item)

    def leave(self, engine: str) -> None:
        """Feed ``engine`` no more."""
        self._leave([engine])

    def heard(self, now: float) -> None:
        """The server is there: what it has is told of anyway."""

    def doubt(self) -> None:
        """It has not answered for long."""
        self._leave(self._of.keys() - {self._server.id})

    def lost(self, now: float) -> None:  # noqa: ARG002 - the exporter has a clock of its own
        """It is not there."""
        self.doubt()

    def _leave(self, engines: Iterable[str]) -> None:
        """Name them no more, once all that was said of them is safe."""
        leaves: dict[_Stream, dict[str, _Leave]] = {}
        for engine in engines:
            stream = self._of.get(engine)
            if stream is not None and engine not in self._leaving:
                leave = self._leaving[engine] = _Leave(stream.info(engine))
                leaves.setdefault(stream, {})[engine] = leave
        for stream, some in leaves.items():
            stream.after(partial(self._unname, stream, some))

    def _unname(self, stream: _Stream, leaves: _Leaves) -> None:
        left = self._still(leaves)
        if left:
            stream.unname(left)
            for engine in left:
                del self._of[engine]
            stream.after(partial(self._forget, left))

    def _forget(self, leaves: _Leaves) -> None:
        for engine in self._still(leaves):
            del self._leaving[engine]

    def _still(self, leaves: _Leaves) -> _Leaves:
        return {e: leave for e, leave in leaves.items() if self._leaving.get(e) is leave}

    def _stream_with_room(self) -> _Stream:
        for stream in self._streams:
            if stream.has_room:
                return stream
        return self._open([])

    def _open(self, infos: Sequence[EngineInfo]) -> _Stream:
        made = _Stream(self._publish(len(self._streams), infos), infos, self._server)
        self._streams.append(made)
        self._of |= {info.id: made for info in infos}
        return made


class _Stream:
    """One stream, and which engine each of its places means.

    Args:
        infos: The engines that it names already.
        placeholder: The engine that is named in places that are free.
    """

    def __init__(
        self, publisher: Publisher, infos: Sequence[EngineInfo], placeholder: EngineInfo
    ) -> None:
        self.publisher = publisher
        self._infos = list(infos)
        self._placeholder = placeholder
        self._loop = asyncio.get_running_loop()
        self._places = {info.id: place for place, info in enumerate(infos)}
        self._free: list[int] = []

    @property
    def has_room(self) -> bool:
        """Whether one engine more can be told of."""
        return bool(self._free) or len(self._infos) < MAX_ENGINES_PER_STREAM

    def info(self, engine: str) -> EngineInfo:
        """What it says of an engine that it names."""
        return self._infos[self._places[engine]]

    def tell(self, info: EngineInfo, item: Item) -> None:
        """Send ``item``, and before it the engine's name if that is new."""
        place = self._places.get(info.id)
        if place is None:
            place = self._places[info.id] = self._take()
        if self._infos[place] != info:
            self._infos[place] = info
            self.publisher.describe(self._infos)
        item.engine = place
        self.publisher.push(item)

    def unname(self, engines: Iterable[str]) -> None:
        """Name them no more; their places are free."""
        for engine in engines:
            place = self._places.pop(engine)
            self._infos[place] = self._placeholder
            self._free.append(place)
        self.publisher.describe(self._infos)

    def after(self, then: Callable[[], None]) -> None:
        """Call ``then``, in the event loop, once all that was said is safe."""

        def ready() -> None:
            # The loop may have ended before the publisher.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(then)

        self.publisher.after(ready)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        self._infos.append(self._placeholder)
        return len(self._infos) - 1
