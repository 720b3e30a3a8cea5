"""What stands between the socket and the session: who is heard, and what may be named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from sidestep.errors import WireError
from sidestep.protocol.messages import Hello
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.bindings import LOCAL, Bindings
from sidestep.transport.throttle import PENALTY, Throttle

log = logging.getLogger(__name__)


class Authorized(Protocol):
    """The keys that may connect, as they are now."""

    def __contains__(self, key: str) -> bool: ...
    def __len__(self) -> int: ...
    def engines(self, key: str) -> Sequence[str]:
        """Patterns of the engine ids that ``key`` may feed; empty: all."""


class Guard:
    """Decides about peers by their connection and their key, without socket or clock.

    Args:
        metrics: Where refusals are counted.
        clock: Monotonic seconds, for the log alone.
        keys: Those that are authorized; ``None``: none is asked for.
        is_full: Whether there is no room for new streams.
    """

    def __init__(
        self,
        metrics: SelfMetrics,
        clock: Callable[[], float],
        keys: Authorized | None = None,
        is_full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._throttle = Throttle()
        self._bindings = Bindings()
        self._metrics = metrics
        self._keys = keys
        self._is_full = is_full
        self._said = RateLimitedLog(log, clock=clock)
        if keys is not None:
            metrics.read("sidestep_authorized_keys", lambda: [((), len(keys))])

    def hears(self, peer: bytes, key: str, now: float) -> bool:
        """Whether a message of ``peer`` is to be read at all; counts it if not."""
        if not self._throttle.ignores(key or peer, now):
            return True
        self._metrics.add("sidestep_rejected_total", 1, "throttled")
        return False

    def check(self, key: str) -> None:
        """Refuse what comes over a connection whose key is authorized no more.

        libzmq asks about a key when a connection begins, and never again.

        Raises:
            WireError: It is.
        """
        if self._keys is not None and key != LOCAL and key not in self._keys:
            raise WireError("unauthorised", "this key is authorized no more")

    def admit(self, key: str, hello: Hello, known: Callable[[str], object]) -> None:
        """Let a stream begin, or go on.

        Args:
            key: Of the connection.
            hello: What it said.
            known: Whether there is a stream of that id.

        Raises:
            WireError: It names what is another key's, or there is no memory for new streams.
        """
        if self._is_full() and not known(hello.stream):
            raise WireError("over_limit", "no memory for new streams")
        if self._keys is not None:
            engines = [engine.id for engine in hello.engines]
            self._bindings.claim(key, hello.stream, engines, self._keys.engines(key))

    def admit_source(self, key: str, source: str, engine: str, *, known: bool) -> None:
        """Let another exporter tell of an engine, or go on.

        Args:
            key: Of the connection.
            source: What that exporter calls itself.
            engine: The engine's identity there.
            known: Whether ``source`` has told of it before.

        Raises:
            WireError: It is another key's, or there is no memory for more.
        """
        if self._is_full() and not known:
            raise WireError("over_limit", "no memory for new sources")
        if self._keys is not None:
            self._bindings.claim_source(key, source, engine, self._keys.engines(key))

    def owner(self, source: str) -> str | None:
        """The key that the name of an exporter belongs to; None where nobody's."""
        return self._bindings.owner(source)

    def own(self, key: str, source: str) -> None:
        """Let the name belong to ``key`` again, as before a restart, if that may still connect."""
        if self._keys is not None and (key == LOCAL or key in self._keys):
            self._bindings.own(key, source)

    def bad(self, peer: bytes, key: str, now: float) -> None:
        """Count a message that no sender of ours would send."""
        if self._throttle.bad(key or peer, now):
            who = f"key {key}" if key else f"connection {peer.hex()}"
            text = "%s sends nothing but nonsense: ignored for %d s"
            self._said.warning("throttled", text, who, PENALTY)

    def release(self, keys: Iterable[str]) -> None:
        """Give free what ``keys`` owned, which are authorized no more."""
        for key in keys:
            self._bindings.release(key)
