"""The ROUTER socket that engines connect to: binding, authentication and rebinding."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from sidestep.errors import ConfigError
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.transport.access import Access
from sidestep.transport.addresses import TCP
from sidestep.transport.endpoint import ZAP_DOMAIN, Claim, claim, require_keys, router
from sidestep.transport.process import seed_library

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
HANDSHAKES = 64
"""Handshakes answered per call, so that a flood of them cannot block the event loop."""
_KEY_BYTES = 32


class Authenticator:
    """ZAP handler (RFC 27) of one context: libzmq asks it at each CURVE handshake about the key.

    pyzmq's own handler runs in a task or thread that one exception ends silently. The event loop calls
    this one, and it answers every request.

    Attributes:
        up: False from a request that could not be checked until the next one that could.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        allows: Callable[[str], bool],
        denied: Callable[[], None],
    ) -> None:
        self.up = True
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)
        self._allows = allows
        self._denied = denied
        self._log = RateLimitedLog(log)

    def serve(self) -> bool:
        """Answer pending requests; return whether more may be pending."""
        for _ in range(HANDSHAKES):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                self._answer(frames)
                self.up = True
            except Exception as error:  # noqa: BLE001 - logged, and exposed as sidestep_zap_up 0
                # The request was denied, or its handshake times out.
                self.up = False
                self._log.error("failed", "a key could not be checked", trace=error)
        return True

    def _answer(self, frames: list[bytes]) -> None:
        split = frames.index(b"") + 1
        envelope, (version, request, domain, address, _, mechanism, *rest) = (
            frames[:split],
            frames[split:],
        )
        key = ""
        if mechanism == b"CURVE" and len(rest) == 1 and len(rest[0]) == _KEY_BYTES:
            key = z85.encode(rest[0]).decode()
        allowed = False
        try:
            allowed = bool(key) and domain == ZAP_DOMAIN.encode() and self._allows(key)
        finally:
            # Not 400: after a 400 libzmq's client never retries, though its key may be added soon.
            status = (b"200", b"OK") if allowed else (b"300", b"Not authorized")
            user = key.encode() if allowed else b""
            self.socket.send_multipart([*envelope, version, request, *status, user, b""])
        if not allowed:
            self._denied()
            self._log.warning(
                "denied",
                "rejected %s: key %s is not authorized",
                address.decode("ascii", "replace"),
                key or "-",
            )


log = logging.getLogger(__name__)

USER = "User-Id"
SKIPPED = 1000
"""Parts of an overlong message that one call reads."""

EVENTS = (
    zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)

Socket = zmq.Socket[bytes]


Arrival = tuple[bytes, str, list[bytes]]
"""A message's peer, the CURVE key of its connection (empty where none is required) and its frames.

A valid message has one frame."""
SKIPPING: Arrival = (b"", "", [])
"""Returned while an overlong message is being skipped: call ``receive`` again."""


class IngestListener:
    """One ROUTER socket with all its endpoints and the handler of its CURVE handshakes.

    Args:
        denied: Called for each peer whose key is not authorized.

    Attributes:
        socket: ``None`` between ``cut`` and ``reopen``.
        unbound: True if the last ``reopen`` failed to bind an endpoint.
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
            # TCP endpoints come last, because paths bound after them would require CURVE as well.
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
        """Log a failed handshake, which the peer logs as well; ``Authenticator`` logs denied keys."""
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
        key = ""
        if self._access.secret is None:
            frame = self.socket.recv()
            more = self.socket.getsockopt(zmq.RCVMORE)
        else:
            # This costs 2 to 4 us more than a copy. A cache of keys by routing id would be wrong: a
            # peer may choose the routing id that another one had.
            whole = self.socket.recv(copy=False)
            frame, more = whole.bytes, whole.more
            # A peer over ipc has no user id, which raises here.
            with contextlib.suppress(zmq.ZMQError):
                key = str(whole.get(USER))
        self._skipping = bool(more)
        return peer, key, [] if more else [frame]

    def _skip(self, socket: Socket) -> Arrival | None:
        """Skip the rest of a message with too many parts, and return the message after it."""
        for _ in range(SKIPPED):
            # Without a copy, since libzmq's thread receives more parts meanwhile.
            if not socket.recv(zmq.NOBLOCK, copy=False).more:
                self._skipping = False
                return self.receive()
        return SKIPPING

    def send(self, peer: bytes, frame: bytes) -> None:
        """Send ``frame`` to ``peer``, or drop it if the peer does not read: senders retry."""
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
        # Each socket has its own context: when the context has terminated, no connection is left.
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
