"""The handler that libzmq asks, at every CURVE handshake, whether a key may connect.

ZAP is RFC 27. pyzmq's own handler runs in a task, or a thread, that one exception
ends without a word; this one is called by whoever owns the event loop and answers
every request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq
from zmq.utils import z85

from sidestep.telemetry.logs import RateLimitedLog

log = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = "sidestep"
REQUESTS = 64
"""Handshakes that are answered in one turn: a flood of them is not to hold the loop."""
_CREDENTIALS = 6
_KEY_BYTES = 32


class Authenticator:
    """Answers for one context.

    Args:
        context: That of the sockets which ask; one of its ends is bound here.
        allows: Whether a key, as Z85, may connect.
        denied: Called for each that may not.

    Attributes:
        up: False from a request that could not be answered as it should, until one is.
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
        self.socket.bind(ENDPOINT)
        self._allows = allows
        self._denied = denied
        self._said = RateLimitedLog(log)

    def serve(self) -> bool:
        """Answer what is asked; whether there may be more."""
        for _ in range(REQUESTS):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                self._answer(frames)
                self.up = True
            except Exception as error:  # noqa: BLE001 - logged, and shown as not being up
                # Whatever it was, it was answered with no, or its time runs out.
                self.up = False
                self._said.error("failed", "a key could not be checked", trace=error)
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
            allowed = bool(key) and domain == DOMAIN.encode() and self._allows(key)
        finally:
            # Not 400: libzmq's client then never tries again, though its key may be added soon.
            status = (b"200", b"OK") if allowed else (b"300", b"Not authorized")
            user = key.encode() if allowed else b""
            self.socket.send_multipart([*envelope, version, request, *status, user, b""])
        if not allowed:
            self._denied()
            self._said.warning(
                "denied",
                "turned away %s: key %s is not among the authorized ones",
                address.decode("ascii", "replace"),
                key or "-",
            )
