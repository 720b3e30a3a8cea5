"""One HTTP connection with a deadline, between its transport and aiohttp's protocol; limits on clients."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import ssl
from collections.abc import Callable
from typing import cast


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the HTTP server.

    Attributes:
        request_seconds: Time for a handshake and a whole request head, from its first byte.
        response_seconds: Time from a request's head to the last byte of the response.
        idle_seconds: Time a connection stays open between requests; more than Prometheus' 5
            minutes, so that Prometheus is the one that closes.
        body_bytes: Bytes a client may send between two requests; bodies are ignored.
        unsent_bytes: Bytes of pages that clients have not read yet, in total.
        waiting_passwords: Passwords that may wait for verification.
        check_interval: Seconds between two checks of deadlines and configuration files.
    """

    connections: int = 512
    request_seconds: float = 10.0
    response_seconds: float = 60.0
    idle_seconds: float = 330.0
    body_bytes: int = 256 * 1024
    concurrent_renders: int = 4
    unsent_bytes: int = 256 * 1024 * 1024
    waiting_passwords: int = 16
    check_interval: float = 1.0


Admit = Callable[[ssl.SSLObject | None], bool]


class Connection(asyncio.Protocol):
    """Forwards all events to ``inner`` and enforces a deadline on the peer.

    aiohttp closes an idle connection, but lets a client send or read a byte a minute for ever. By
    ``deadline``, the peer must have finished the handshake and its request head, or have read the
    response.

    Attributes:
        deadline: On the loop's clock.
        has_sent_request: Whether the peer has ever sent a whole request.
        transport: None before the handshake is done and after the end.
    """

    def __init__(
        self, make: Callable[[], asyncio.Protocol], is_valid: Admit, limits: Limits, peer: str
    ) -> None:
        self._make = make
        self._admit = is_valid
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._inner: asyncio.Protocol | None = None
        self._is_responding = False
        self._received = 0
        self.peer = peer
        self.transport: asyncio.Transport | None = None
        self.deadline = self._loop.time() + limits.request_seconds
        self.has_sent_request = False
        self.closed: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start aiohttp's protocol after the handshake, unless the client is not admitted."""
        self.transport = cast(asyncio.Transport, transport)
        if not self._admit(transport.get_extra_info("ssl_object")):
            self.transport.abort()
            return
        self._inner = self._make()
        # aiohttp starts its task here, which inherits the context.
        context = contextvars.copy_context()
        context.run(serving.set, self)
        context.run(self._inner.connection_made, transport)

    def data_received(self, data: bytes) -> None:
        """Forward received bytes; abort a peer that sends more than a request may have."""
        if self._inner is None or self.transport is None:
            return
        if not self._received and not self._is_responding:
            self.deadline = min(self.deadline, self._loop.time() + self._limits.request_seconds)
        self._received += len(data)
        if self._received > self._limits.body_bytes:
            self.transport.abort()
            return
        self._inner.data_received(data)

    def request_started(self) -> None:
        """Start the response's deadline: the head of a request is complete."""
        self._is_responding = self.has_sent_request = True
        self._received = 0
        self.deadline = self._loop.time() + self._limits.response_seconds

    def response_finished(self) -> None:
        """Start the idle deadline, or that of the next request if it has begun to arrive."""
        self._is_responding = False
        timeout = (
            self._limits.request_seconds
            if self._received
            else self._limits.idle_seconds + self._limits.request_seconds
        )
        self.deadline = self._loop.time() + timeout

    def is_overdue(self, now: float) -> bool:
        """Return whether the deadline has passed; a closing connection gets no idle time."""
        if self.transport is not None and self.transport.is_closing():
            self.deadline = min(self.deadline, now + self._limits.request_seconds)
        return now > self.deadline

    def eof_received(self) -> bool | None:
        """Forward to ``inner``."""
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        """Forward to ``inner``."""
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Forward to ``inner``."""
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Mark the connection as closed."""
        self.transport = None
        if not self.closed.done():
            self.closed.set_result(None)
        if self._inner is not None:
            self._inner.connection_lost(exc)


serving: contextvars.ContextVar[Connection] = contextvars.ContextVar("serving")
"""The connection whose request the current task handles."""
