"""Claims of servers to one identity: each living server feeds engines of its own (R10).

Ids of streams and engines are stable over restarts, so that a new process continues the series of
the one before. Two servers with equal ids would feed the same series; the second one gets replica
number 2, which its ids carry: ``host/model/0`` becomes ``host~2/model/0``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from sidestep.errors import WireError
from sidestep.protocol.limits import MAX_LABEL_CHARS
from sidestep.protocol.messages import CORE, FRONT_END_STATS, EngineInfo, Hello
from sidestep.protocol.stream import Stream, StreamState

ALIVE_AFTER = 1.0
"""Seconds after a Hello from which on a message proves that its sender is alive: senders send a
heartbeat each second, and earlier messages may have waited in a socket."""
SILENT_AFTER = 2.5
"""Seconds of silence after which another process may take over a stream."""
REPEATED_WITHIN = 10.0
"""Seconds within which a sender repeats a Hello."""
MAX_REPLICAS = 64
MAX_WAITING = 256


class Placement(NamedTuple):
    """A Hello with the ids under which its server is counted.

    Attributes:
        replica: Number of the server among those that claim the ids.
        rival: A living stream of another server with the ids that the sender asked for.
    """

    hello: Hello
    replica: int = 1
    rival: Stream | None = None


class Claims:
    """Claims to the ids of ``streams``, which the caller owns."""

    def __init__(self, streams: Mapping[str, Stream]) -> None:
        self._streams = streams
        self._waiting: dict[int, tuple[float, float]] = {}
        """By incarnation without a place: times of its first and its last Hello."""

    def place(self, hello: Hello, now: float) -> Placement | None:
        """Place the Hello of a new incarnation: behind all servers that are alive.

        None: it is not known yet whether another one is alive.

        Raises:
            WireError: Too many servers are alive, or a process of this server counts the same.
        """
        taken = self._streams.get(hello.stream)
        if taken is not None and taken.state is StreamState.LOCAL:
            return Placement(hello)
        since = self._first_hello(hello.incarnation, now)
        rival: Stream | None = None
        for replica in self._candidates(hello):
            ids = {numbered_id(info.id, replica) for info in hello.engines}
            rivals = list(self._rivals(hello, replica, ids))
            living = next((s for s in rivals if _is_alive(s, since)), None)
            if living is not None:
                rival = rival or living
                continue
            opposed = list(self._opposed(hello, replica))
            if not all(_is_gone(s, since, now) for s in (*rivals, *opposed)):
                if any(_is_alive(s, since) for s in opposed):
                    raise WireError("id_conflict", _COUNTED_TWICE)
                return None
            return Placement(numbered(hello, replica), replica, rival)
        raise WireError("over_limit", f"{MAX_REPLICAS} processes have the id {hello.stream}")

    def restart_waits(self) -> None:
        """Forget all Hellos: the exporter has stood still, so what it reads now may be older than it seems."""
        self._waiting.clear()

    def forget(self, incarnation: int) -> None:
        """Forget the Hellos of an incarnation that has been placed."""
        self._waiting.pop(incarnation, None)

    def _first_hello(self, incarnation: int, now: float) -> float:
        first, last = self._waiting.pop(incarnation, (now, now))
        if now - last > REPEATED_WITHIN:
            first = now
        self._waiting[incarnation] = first, now
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
        return first

    def _candidates(self, hello: Hello) -> Iterator[int]:
        """Yield the replica numbers in the order of preference: those that the server has first."""
        own = {
            stream.replica
            for stream in self._streams.values()
            if hello.server and stream.server == hello.server and _shares(stream, hello.engines)
        }
        yield from sorted(own)
        yield from (replica for replica in range(1, MAX_REPLICAS + 1) if replica not in own)

    def _rivals(self, hello: Hello, replica: int, ids: set[str]) -> Iterator[Stream]:
        """Yield the streams that must not be alive, if the sender of ``hello`` is the replica."""
        name = numbered_id(hello.stream, replica)
        for stream in self._streams.values():
            if stream.id == name or (
                stream.replica == replica
                and hello.server
                and stream.server not in ("", hello.server)
                and not ids.isdisjoint(info.id for info in stream.engines)
            ):
                yield stream

    def _opposed(self, hello: Hello, replica: int) -> Iterator[Stream]:
        """Yield streams that count what the sender of ``hello`` counts.

        A front end that does not know that the core has a tap counts all, as the core does.
        """
        roles = {numbered_id(info.id, replica): info for info in hello.engines}
        for stream in self._streams.values():
            for info in stream.engines if stream.replica == replica else ():
                other = roles.get(info.id)
                if other is not None and (_doubles(info, other) or _doubles(other, info)):
                    yield stream


def numbered_id(name: str, replica: int) -> str:
    """Return the id of a replica: its number follows the namespace."""
    if replica == 1:
        return name
    namespace, slash, rest = name.partition("/")
    return f"{namespace}~{replica}{slash}{rest}"


def numbered(hello: Hello, replica: int) -> Hello:
    """Return ``hello`` with the ids of a replica."""
    if replica == 1:
        return hello
    engines = [
        msgspec.structs.replace(info, id=numbered_id(info.id, replica)) for info in hello.engines
    ]
    found = msgspec.structs.replace(
        hello, stream=numbered_id(hello.stream, replica), engines=engines
    )
    if max(map(len, (found.stream, *(info.id for info in engines)))) > MAX_LABEL_CHARS:
        raise WireError("over_limit", "another process has this id, which is too long for a number")
    return found


_COUNTED_TWICE = (
    "another process of this engine counts the same requests: the scheduler's tap is not visible in"
    " --scheduler-cls; name a class that derives from SidestepScheduler there"
)


def _is_alive(stream: Stream, since: float) -> bool:
    return stream.state is not StreamState.CLOSED and stream.seen_at >= since + ALIVE_AFTER


def _is_gone(stream: Stream, since: float, now: float) -> bool:
    is_silent = now - stream.seen_at >= SILENT_AFTER and now - since >= ALIVE_AFTER
    return stream.state is StreamState.CLOSED or is_silent


def _shares(stream: Stream, engines: Iterable[EngineInfo]) -> bool:
    """Return whether ``stream`` feeds one of ``engines``, under the ids of its server."""
    ids = {numbered_id(info.id, stream.replica) for info in engines}
    return not ids.isdisjoint(info.id for info in stream.engines)


def _doubles(core: EngineInfo, other: EngineInfo) -> bool:
    """Return whether ``other`` counts the requests that ``core`` has sent to it and counts itself."""
    is_tapped = core.role == CORE and FRONT_END_STATS in core.features
    return is_tapped and not other.role and other.dialect == core.dialect
