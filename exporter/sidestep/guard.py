"""What stands between the socket and the session: who is heard, and what may be named."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sidestep.access import Access
from sidestep.bindings import LOCAL, Bindings
from sidestep.errors import WireError
from sidestep.selfmetrics import SelfMetrics
from sidestep.throttle import PENALTY, Throttle
from sidestep.watchdog import Watchdog
from sidestep.wire.messages import Hello

log = logging.getLogger(__name__)

SAY_AGAIN = 10.0


class Guard:
    """Decides about peers by their connection and their key; neither reads nor writes a socket.

    Args:
        access: Whose ``keys`` say which key is authorized.
        watchdog: Whose ``full`` says whether there is room for new streams.
        metrics: Where refusals are counted.
    """

    def __init__(self, access: Access, watchdog: Watchdog, metrics: SelfMetrics) -> None:
        self.throttle = Throttle()
        self.bindings = Bindings()
        self._keys = access.keys
        self._watchdog = watchdog
        self._metrics = metrics
        self._said_at = -SAY_AGAIN
        if self._keys is not None:
            metrics.read("sidestep_authorized_keys", lambda: [((), len(self._keys or ()))])

    def hears(self, peer: bytes, key: str, now: float) -> bool:
        """Whether a message of ``peer`` is to be read at all; counts it if not."""
        if not self.throttle.ignores(key or peer, now):
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
        if self._watchdog.full and not known(hello.stream):
            raise WireError("over_limit", "no memory for new streams")
        if self._keys is not None:
            engines = [engine.id for engine in hello.engines]
            self.bindings.claim(key, hello.stream, engines, self._keys.engines(key))

    def bad(self, peer: bytes, key: str, now: float) -> None:
        """Count a message that no sender of ours would send."""
        if self.throttle.bad(key or peer, now) and now - self._said_at >= SAY_AGAIN:
            self._said_at = now
            log.warning(
                "%s sends nothing but nonsense: ignored for %d s",
                f"key {key}" if key else f"connection {peer.hex()}",
                PENALTY,
            )

    def refresh(self, now: float) -> None:
        """Take over changed key files; may be called as often as is convenient."""
        if self._keys is not None:
            for key in self._keys.refresh(now):
                self.bindings.release(key)
