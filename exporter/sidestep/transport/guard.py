"""The guard of the session protocol: throttling, authorization and ownership of names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from sidestep.errors import WireError
from sidestep.protocol.messages import Hello
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.name_owners import LOCAL, NameOwners
from sidestep.transport.throttle import PENALTY, Throttle

log = logging.getLogger(__name__)


class Authorized(Protocol):
    """The public keys that may connect now."""

    def __contains__(self, key: str) -> bool: ...
    def __len__(self) -> int: ...
    def engines(self, key: str) -> Sequence[str]:
        """Return patterns of the engine ids that ``key`` may feed; empty: all."""


class PeerGuard:
    """Admission of peers by connection and key, without socket or clock.

    Args:
        metrics: Self-metrics that count rejections.
        clock: Monotonic seconds, for the log only.
        keys: Authorized keys; ``None``: no key is required.
        is_full: Returns whether memory is too low for new streams.
    """

    def __init__(
        self,
        metrics: SelfMetrics,
        clock: Callable[[], float],
        keys: Authorized | None = None,
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
        """Return whether to read a message of ``peer``; count a throttled one."""
        if not self._throttle.ignores(key or peer, now):
            return True
        self._metrics.add("sidestep_rejected_total", 1, "throttled")
        return False

    def check(self, key: str) -> None:
        """Reject messages of a connection whose key is no longer authorized.

        libzmq checks a key only when a connection begins.

        Raises:
            WireError: The key is no longer authorized.
        """
        if self._keys is not None and key != LOCAL and key not in self._keys:
            raise WireError("unauthorised", "this key is no longer authorized")

    def admit(self, key: str, hello: Hello, known: Callable[[str], object]) -> None:
        """Admit a stream that begins or continues.

        Args:
            key: Key of the connection.
            hello: Hello of the stream.
            known: Returns a truthy value if a stream of that id exists.

        Raises:
            WireError: A name belongs to another key, or memory is too low for new streams.
        """
        if self._is_full() and not known(hello.stream):
            raise WireError("over_limit", "no memory for new streams")
        if self._keys is not None:
            engines = [engine.id for engine in hello.engines]
            self._owners.claim(key, hello.stream, engines, self._keys.engines(key))

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
