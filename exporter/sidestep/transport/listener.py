"""The ROUTER socket that engines connect to: binding, authentication and rebinding."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from sidestep.errors import ConfigError
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.transport.access import Access
from sidestep.transport.addresses import TCP
from sidestep.transport.endpoint import Claim, claim, require_keys, router
from sidestep.transport.process import seed_library
from sidestep.transport.zap import Authenticator

log = logging.getLogger(__name__)

USER = "User-Id"
SKIPPED = 1000
"""Parts of an overlong message that one call reads."""

EVENTS = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

Socket = zmq.Socket[bytes]


class Arrival(NamedTuple):
    """One received message.

    Attributes:
        peer: The connection that replies go to.
        key: CURVE key of the connection; empty where none is required.
        frames: Frames of the message; a valid message has exactly one.
    """

    peer: bytes
    key: str
    frames: list[bytes]


SKIPPING = Arrival(b"", "", [])
"""Returned while an overlong message is being skipped: call ``receive`` again."""


class IngestListener:
    """One ROUTER socket with all its endpoints and the handler of its CURVE handshakes.

    Args:
        endpoints: Endpoints to bind.
        access: Keys and groups that may connect.
        denied: Called for each peer whose key is not authorized.

    Attributes:
        socket: ``None`` between ``cut`` and ``reopen``.
        unbound: True if the last ``reopen`` failed to bind an endpoint.

    Raises:
        ConfigError: An endpoint is malformed, in use, or may not be bound.
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
        self._log = RateLimitedLog(log)
        self._claims: dict[int, Claim] = {}
        self.socket: Socket | None = None
        self.zap: Authenticator | None = None
        self._accepts: Socket | None = None
        socket = self._make()
        try:
            # TCP endpoints last: paths bound after them would require CURVE as well.
            for index, endpoint in sorted(enumerate(endpoints), key=lambda e: e[1].startswith(TCP)):
                self._require_keys(socket, endpoint)
                self._claims[index] = claim(socket, endpoint, access.group)
        except ConfigError:
            self.close(0)
            raise
        for endpoint in filter(access.is_open, endpoints):
            log.warning(
                "%s accepts metrics from any host that can reach it (ingest.allow-plain-tcp)",
                endpoint,
            )

    @property
    def endpoints(self) -> list[str]:
        """The bound endpoints; port 0 is replaced by the actual port."""
        return [claimed.endpoint for _, claimed in sorted(self._claims.items())]

    @property
    def descriptors(self) -> list[int]:
        """File descriptors to watch for reading; they change with ``reopen``."""
        sockets = (self.socket, self._accepts, self.zap.socket if self.zap else None)
        return [socket.fileno() for socket in sockets if socket is not None]

    @property
    def lost(self) -> bool:
        """True if an endpoint is unbound or its socket file has been replaced or removed."""
        return self.unbound or any(claimed.lost() for claimed in self._claims.values())

    def zap_readings(self) -> list[tuple[tuple[str, ...], float]]:
        """Return the samples of ``sidestep_zap_up``; none where CURVE is not required."""
        if self._access.secret is None:
            return []
        return [((), float(self.zap is not None and self.zap.up))]

    def authenticate(self) -> bool:
        """Answer pending handshakes; return whether more may be pending."""
        return self.zap is not None and self.zap.serve()

    def has_accepted(self) -> bool:
        """Return whether connections were accepted since the last call."""
        accepted = False
        with contextlib.suppress(zmq.Again):
            while self._accepts is not None:
                event = recv_monitor_message(self._accepts, zmq.NOBLOCK)
                accepted |= event["event"] == zmq.EVENT_ACCEPTED
                self._log_failed_handshake(event["event"], event["endpoint"].decode())
        return accepted

    def _log_failed_handshake(self, event: int, endpoint: str) -> None:
        """Log what a peer with wrong keys has in its own log, too; ``zap`` logs those it denies."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            text = "the handshake of a peer at %s fails: check its keys, which both ends need or neither"
            self._log.warning(f"handshake {endpoint}", text, endpoint)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and endpoint.startswith(TCP):
            text = "a peer ends its handshake at %s: it is a probe of the port, or an engine with wrong keys"
            self._log.info(f"ended {endpoint}", text, endpoint)

    def receive(self) -> Arrival | None:
        """Return the next message, or None if there is none."""
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
            # 2 to 4 microseconds more than a copy. Caching the key per routing id would be
            # cheaper, and wrong: a peer may choose the old routing id of another one.
            whole = self.socket.recv(copy=False)
            frame, more = whole.bytes, whole.more
            # A peer over ipc has no user id, which raises here.
            with contextlib.suppress(zmq.ZMQError):
                key = str(whole.get(USER))
        self._skipping = bool(more)
        return Arrival(peer, key, [] if more else [frame])

    def _skip(self, socket: Socket) -> Arrival | None:
        """Skip the rest of a message with too many parts, and return the message after it."""
        for _ in range(SKIPPED):
            # Not copied: libzmq's thread takes in more meanwhile.
            if not socket.recv(zmq.NOBLOCK, copy=False).more:
                self._skipping = False
                return self.receive()
        return SKIPPING

    def send(self, peer: bytes, frame: bytes) -> None:
        """Send ``frame`` to ``peer``; drop it if the peer is gone or not reading, as senders retry."""
        if self.socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send_multipart([peer, frame], zmq.NOBLOCK)

    def cut(self, linger: int = 0) -> None:
        """Close the socket and all connections; their memory is free when this returns."""
        if self.socket is None:
            return
        self.socket.disable_monitor()
        if self._accepts is not None:
            self._accepts.close(linger=0)
        self.socket.close(linger=linger)
        if self.zap is not None:
            self.zap.socket.close(linger=0)
        # libzmq's threads close the connections; this waits for them.
        self._context.term()
        self.socket = self.zap = self._accepts = None

    def reopen(self) -> None:
        """Bind all endpoints again; set ``unbound`` if one fails."""
        self.cut()
        socket = self._make()
        self.unbound = False
        for index, claimed in self._claims.items():
            try:
                self._require_keys(socket, claimed.endpoint)
                self._claims[index] = claimed.rebind(socket)
            except ConfigError as error:
                self.unbound = True
                self._log.warning(claimed.endpoint, "%s; retrying", error)

    def close(self, linger: int) -> None:
        """Send pending replies for at most ``linger`` milliseconds, then release all endpoints."""
        self.cut(linger)
        for claimed in self._claims.values():
            claimed.release()
        self._claims = {}

    def _make(self) -> Socket:
        # One context per socket: when it has terminated, no connection is left.
        self._context = zmq.Context()
        self._skipping = False
        keys = self._access.keys
        if keys is not None:
            self.zap = Authenticator(self._context, keys.__contains__, self._denied)
        seed_library()
        self.socket = router(self._context)
        self._accepts = self.socket.get_monitor_socket(EVENTS)
        return self.socket

    def _require_keys(self, socket: Socket, endpoint: str) -> None:
        if self._access.secret is not None and endpoint.startswith(TCP):
            require_keys(socket, self._access.secret)
