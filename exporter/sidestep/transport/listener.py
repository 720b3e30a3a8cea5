"""The ROUTER as engines see it: bound, open to whom the keys name, and bound anew at need."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from sidestep.errors import ConfigError
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.transport.access import Access
from sidestep.transport.endpoint import Claim, claim, require_keys, router
from sidestep.transport.process import seed_library
from sidestep.transport.reach import TCP
from sidestep.transport.zap import Authenticator

log = logging.getLogger(__name__)

USER = "User-Id"
SKIPPED = 1000
"""Parts of an overlong message that are read in one go."""

Socket = zmq.Socket[bytes]


class Arrival(NamedTuple):
    """One message.

    Attributes:
        peer: The connection, to be answered.
        key: The CURVE key it connected with; empty where none is asked for.
        frames: One, in a message as it should be.
    """

    peer: bytes
    key: str
    frames: list[bytes]


SKIPPING = Arrival(b"", "", [])
"""No message: the rest of one that was too long takes another turn."""


class Listener:
    """One ROUTER with all its endpoints, and the handler that its handshakes ask.

    Args:
        endpoints: Where to bind.
        access: Who may connect.
        denied: Called for each peer whose key is not authorized.

    Attributes:
        socket: ``None`` between ``cut`` and ``reopen``.
        unbound: Whether the last ``reopen`` could not have all endpoints.

    Raises:
        ConfigError: An endpoint is malformed, taken, or may not be bound.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        access: Access = Access(),  # noqa: B008 - frozen
        denied: Callable[[], None] = lambda: None,
    ) -> None:
        for endpoint in endpoints:
            access.check(endpoint)
        self._access = access
        self._denied = denied
        self._skipping = self.unbound = False
        self._said = RateLimitedLog(log)
        self._claims: dict[int, Claim] = {}
        self.socket: Socket | None = None
        self.zap: Authenticator | None = None
        self._accepts: Socket | None = None
        socket = self._make()
        try:
            # Ports last: what they demand, later paths would demand as well.
            for place, endpoint in sorted(enumerate(endpoints), key=lambda e: e[1].startswith(TCP)):
                self._demand(socket, endpoint)
                self._claims[place] = claim(socket, endpoint, access.group)
        except ConfigError:
            self.close(0)
            raise
        for endpoint in filter(access.is_open, endpoints):
            log.warning(
                "%s takes metrics from ANYONE who can reach it: ingest.allow-plain-tcp", endpoint
            )

    @property
    def endpoints(self) -> list[str]:
        """Where engines connect; a port 0 shows as the one that was found."""
        return [claimed.endpoint for _, claimed in sorted(self._claims.items())]

    @property
    def descriptors(self) -> list[int]:
        """To be watched for reading; others after ``reopen``."""
        sockets = (self.socket, self._accepts, self.zap.socket if self.zap else None)
        return [socket.fileno() for socket in sockets if socket is not None]

    @property
    def lost(self) -> bool:
        """Whether engines find somebody else, or nobody, where they should find us."""
        return self.unbound or any(claimed.lost() for claimed in self._claims.values())

    def zap_readings(self) -> list[tuple[tuple[str, ...], float]]:
        """For a gauge: whether handshakes are answered; nothing where none asks."""
        if self._access.secret is None:
            return []
        return [((), float(self.zap is not None and self.zap.up))]

    def authenticate(self) -> bool:
        """Answer handshakes; whether more may wait."""
        return self.zap is not None and self.zap.serve()

    def has_accepted(self) -> bool:
        """Return whether connections were accepted since the last call."""
        accepted = False
        with contextlib.suppress(zmq.Again):
            while self._accepts is not None:
                self._accepts.recv_multipart(zmq.NOBLOCK)
                accepted = True
        return accepted

    def receive(self) -> Arrival | None:
        """The next message, if there is one."""
        if self.socket is None:
            return None
        try:
            if self._skipping:
                return self._skip(self.socket)
            peer = self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        key, frame = "", b""
        if self._access.secret is None:
            frame = self.socket.recv()
            more = self.socket.getsockopt(zmq.RCVMORE)
        else:
            # 2 to 4 microseconds more than a copy. A name kept per connection would be
            # cheaper, and wrong: a peer chooses its routing id, another one's old one too.
            whole = self.socket.recv(copy=False)
            frame, more = whole.bytes, whole.more
            # A peer over ipc has no name, which is an error here.
            with contextlib.suppress(zmq.ZMQError):
                key = str(whole.get(USER))
        self._skipping = bool(more)
        return Arrival(peer, key, [] if more else [frame])

    def _skip(self, socket: Socket) -> Arrival | None:
        """Read on in a message that has too many parts, and give what comes after it."""
        for _ in range(SKIPPED):
            socket.recv(zmq.NOBLOCK)
            if not socket.getsockopt(zmq.RCVMORE):
                self._skipping = False
                return self.receive()
        return SKIPPING

    def send(self, peer: bytes, frame: bytes) -> None:
        """Answer ``peer``; where it is gone or does not read, it will ask again."""
        if self.socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send_multipart([peer, frame], zmq.NOBLOCK)

    def cut(self, linger: int = 0) -> None:
        """Close the socket and every connection; when this returns their memory is free."""
        if self.socket is None:
            return
        self.socket.disable_monitor()
        if self._accepts is not None:
            self._accepts.close(linger=0)
        self.socket.close(linger=linger)
        if self.zap is not None:
            self.zap.socket.close(linger=0)
        # Closing is the work of other threads; this waits until they have done it.
        self._context.term()
        self.socket = self.zap = self._accepts = None

    def reopen(self) -> None:
        """Be where engines look for us again; what cannot be had is tried anew next time."""
        self.cut()
        socket = self._make()
        self.unbound = False
        for place, claimed in self._claims.items():
            try:
                self._demand(socket, claimed.endpoint)
                self._claims[place] = claimed.rebind(socket)
            except ConfigError as error:
                self.unbound = True
                self._said.warning(claimed.endpoint, "%s; trying again", error)

    def close(self, linger: int) -> None:
        """Send what is on its way for ``linger`` milliseconds, then give all endpoints free."""
        self.cut(linger)
        for claimed in self._claims.values():
            claimed.release()
        self._claims = {}

    def _make(self) -> Socket:
        # A context for each socket: its end is the proof that no connection is left.
        self._context = zmq.Context()
        self._skipping = False
        keys = self._access.keys
        if keys is not None:
            self.zap = Authenticator(self._context, keys.__contains__, self._denied)
        seed_library()
        self.socket = router(self._context)
        self._accepts = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED)
        return self.socket

    def _demand(self, socket: Socket, endpoint: str) -> None:
        if self._access.secret is not None and endpoint.startswith(TCP):
            require_keys(socket, self._access.secret)
