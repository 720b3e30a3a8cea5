"""The ZAP handler, which libzmq calls at every CURVE handshake to authorize the key.

ZAP is RFC 27. pyzmq's own handler runs in a task or thread that one exception ends silently;
this one is called from the event loop and answers every request.
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
"""Handshakes answered per call, so that a flood of them cannot block the event loop."""
_KEY_BYTES = 32


class Authenticator:
    """ZAP handler of one context.

    Args:
        context: Context of the sockets to authenticate.
        allows: Returns whether a key, as Z85, may connect.
        denied: Called for each denied handshake.

    Attributes:
        up: False after a request that failed to be checked, until one succeeds.
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
        self._log = RateLimitedLog(log)

    def serve(self) -> bool:
        """Answer pending requests; return whether more may be pending."""
        for _ in range(REQUESTS):
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
            allowed = bool(key) and domain == DOMAIN.encode() and self._allows(key)
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
