"""The guard of the session protocol: throttling, authorization and ownership of names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from sidestep.errors import WireError
from sidestep.protocol.messages import Hello
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.access import AuthorizedKeys

log = logging.getLogger(__name__)

LIMIT = 100
"""Invalid messages tolerated within ``PERIOD`` seconds."""
PERIOD = 1.0
PENALTY = 10.0
"""Seconds that a throttled peer is ignored."""
CAPACITY = 1024
"""Peers tracked per table; the oldest entry is evicted."""

Value = TypeVar("Value")
Peer = bytes | str
"""Routing id of a connection, or its key, so that reconnecting does not reset the count."""


class Throttle:
    """Counter of invalid messages per peer, in tables of bounded size."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._counts: dict[Peer, tuple[float, int]] = {}
        self._ignored: dict[Peer, float] = {}
        """By peer: the time until which it is ignored."""

    def __len__(self) -> int:
        return len(self._counts) + len(self._ignored)

    def ignores(self, peer: Peer, now: float) -> bool:
        """Return whether ``peer`` is ignored at ``now``."""
        if now < self._ignored.get(peer, now):
            return True
        self._ignored.pop(peer, None)
        return False

    def count_invalid(self, peer: Peer, now: float) -> bool:
        """Count an invalid message; return whether ``peer`` is ignored from now on."""
        since, count = self._counts.pop(peer, (now, 0))
        if now - since >= PERIOD:
            since, count = now, 0
        if count + 1 > LIMIT:
            self._put(self._ignored, peer, now + PENALTY)
            return True
        self._put(self._counts, peer, (since, count + 1))
        return False

    def _put(self, table: dict[Peer, Value], peer: Peer, value: Value) -> None:
        if len(table) >= self._capacity:
            del table[next(iter(table))]
        table[peer] = value


LOCAL = ""
"""Key of all peers over an ipc path, which file permissions authorize."""
MAX_NAMES = 2048
"""Maximum number of streams and engines of one key."""


class NameOwners:
    """Owners of stream and engine ids."""

    def __init__(self) -> None:
        self._streams: dict[str, str] = {}
        self._engines: dict[str, str] = {}
        self._held: dict[str, int] = {}

    def claim(
        self, key: str, stream: str, engines: Sequence[str], allowed: Sequence[str] = ()
    ) -> None:
        """Assign all names of a Hello to ``key``, or none of them.

        Each engine's id must match one of the ``allowed`` patterns, if there are any.

        Raises:
            WireError: A name belongs to another key or is not allowed, or the key has too many.
        """
        for engine in engines:
            if allowed and not any(fnmatchcase(engine, pattern) for pattern in allowed):
                raise WireError("unauthorised", f"this key may not feed engine {engine}")
        # The text must not name the owner, whose key belongs to another tenant.
        if self._streams.get(stream, key) != key:
            raise WireError("unauthorised", f"stream {stream} belongs to another key")
        for engine in engines:
            if self._engines.get(engine, key) != key:
                raise WireError("unauthorised", f"engine {engine} belongs to another key")
        new = {engine for engine in engines if engine not in self._engines}
        held = self._held.get(key, 0) + len(new) + (stream not in self._streams)
        if held > MAX_NAMES:
            if key == LOCAL:
                return
            raise WireError("over_limit", "this key uses too many streams and engines")
        self._held[key] = held
        self._streams[stream] = key
        self._engines.update(dict.fromkeys(new, key))

    def release(self, key: str) -> None:
        """Release all names of ``key``, which is no longer authorized."""
        for owners in (self._streams, self._engines):
            for name in [name for name, owner in owners.items() if owner == key]:
                del owners[name]
        self._held.pop(key, None)


class PeerGuard:
    """Admission of peers by connection and key, without socket or clock.

    Args:
        clock: Monotonic seconds, for the log only.
        keys: Authorized keys; ``None``: no key is required.
        is_full: Returns whether memory is too low for new streams.
    """

    def __init__(
        self,
        metrics: SelfMetrics,
        clock: Callable[[], float],
        keys: AuthorizedKeys | None = None,
        is_full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._throttle = Throttle()
        self._owners = NameOwners()
        self._metrics = metrics
        self._keys = keys
        self._is_full = is_full
        self._log = RateLimitedLog(log, clock=clock)
        if keys is not None:
            metrics.read("sidestep_authorized_keys", lambda: [((), len(keys))])

    def allows(self, peer: bytes, key: str, now: float) -> bool:
        """Return whether to read a message of ``peer``; count the message if not."""
        if not self._throttle.ignores(key or peer, now):
            return True
        self._metrics.add("sidestep_rejected_total", 1, "throttled")
        return False

    def check(self, key: str) -> None:
        """Check the key of a connection again, since libzmq checks it only when a connection begins."""
        if self._keys is not None and key != LOCAL and key not in self._keys:
            raise WireError("unauthorised", "this key is no longer authorized")

    def claim(self, key: str, hello: Hello) -> None:
        """Assign the names that a sender asks for to its key, as ``NameOwners`` does."""
        if self._keys is not None:
            engines = [engine.id for engine in hello.engines]
            self._owners.claim(key, hello.stream, engines, self._keys.engines(key))

    def admit(self, key: str, hello: Hello, known: Callable[[str], object]) -> None:
        """Admit a stream that begins or continues, with the names under which it is counted.

        Raises:
            WireError: A name belongs to another key, or memory is too low for new streams.
        """
        if self._is_full() and not known(hello.stream):
            raise WireError("over_limit", "no memory for new streams")
        if self._keys is not None:
            # A replica's names are new ones, which another key could ask for.
            self._owners.claim(key, hello.stream, [engine.id for engine in hello.engines])

    def count_invalid(self, peer: bytes, key: str, now: float) -> None:
        """Count an invalid message, and start to ignore the peer at the limit."""
        if self._throttle.count_invalid(key or peer, now):
            name = f"key {key}" if key else f"connection {peer.hex()}"
            text = "%s sends too many invalid messages: ignored for %d s"
            self._log.warning("throttled", text, name, PENALTY)

    def release(self, keys: Iterable[str]) -> None:
        """Release all names that ``keys``, which are no longer authorized, own."""
        for key in keys:
            self._owners.release(key)
