"""A sender's connection with keys, over libzmq."""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import struct

import zmq

from sidestep.errors import ConfigError, RunError
from sidestep.transport.client_keys import Keys
from sidestep.transport.connection_monitor import Socket
from sidestep.transport.dealer import RESENDING, connect_monitored, receive
from sidestep.transport.peer_limits import TOO_MUCH, Allowance

_DESCRIPTORS = 16
"""More than a context with one socket and its monitor opens; libzmq ends the process without them."""
_TCP_INFO_BYTES = 256
_BYTES_RECEIVED = struct.Struct("Q"), 128
"""``tcpi_bytes_received`` in Linux's ``struct tcp_info``, and its offset."""


class CurveConnection:
    """A sender's connection with keys, by libzmq, which reconnects by itself.

    Only the owner of the exporter's secret key can send anything over it. The amount is limited:
    the kernel's count of received bytes is compared with an allowance.

    Args:
        endpoint: ``tcp://``.
        keys: Of both ends.
        now: Monotonic seconds.

    Attributes:
        ended: Reason for which the connection ended; empty while it is usable.
        misbehaved: True if it ended because the peer sent too much.

    Raises:
        ConfigError: The endpoint is malformed.
        RunError: This process has no descriptors left for it.
    """

    def __init__(self, endpoint: str, keys: Keys, now: float) -> None:
        self.ended = ""
        self.misbehaved = False
        self._allowance = Allowance(now)
        self._received = 0
        require_descriptors(_DESCRIPTORS)
        self._context: zmq.Context[Socket] = zmq.Context()
        try:
            self._socket, self._monitor = connect_monitored(
                self._context, endpoint, *RESENDING, keys=keys
            )
        except zmq.ZMQError as error:
            self._context.term()
            raise ConfigError(f"endpoint {endpoint!r}: {error.strerror}") from None

    @property
    def ready(self) -> bool:
        """True if messages can be sent."""
        return self._monitor.connected and not self.ended

    @property
    def problem(self) -> str:
        """Reason for which the peer cannot be reached; empty if none is known."""
        return self.ended or self._monitor.problem

    def send(self, frame: bytes) -> bool:
        """Send ``frame`` if the connection takes it now; return whether it did."""
        if self.ended:
            return False
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, now: float) -> bytes | None:
        """Return the next message, if there is one."""
        self.advance(now)
        if self.ended:
            return None
        message = receive(self._socket)
        if message is not None and not self._allowance.spend(1, 0, now):
            self._refuse()
        return message

    def advance(self, now: float) -> None:
        """End the connection if more bytes arrived than an exporter may send."""
        if self.ended:
            return
        for event in self._monitor.events():
            if event in (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED):
                self._received = 0
        received = _bytes_received(self._monitor.descriptor)
        more, self._received = max(received - self._received, 0), received
        if not self._allowance.spend(0, more, now):
            self._refuse()

    def wait(self, seconds: float) -> None:
        """Return once there may be something to receive, after ``seconds`` at the latest; at once if negative."""
        if not self.ended:
            # Of libzmq's poll and linger, a negative time is endless.
            self._socket.poll(max(int(seconds * 1000), 0))

    def close(self, seconds: float = 0.0) -> None:
        """End the connection; ``seconds`` is how long unsent frames may take to leave."""
        if self._context.closed:
            return
        self.ended = self.ended or "closed"
        self._monitor.close()
        self._socket.close(linger=max(int(seconds * 1000), 0))
        self._context.term()

    def _refuse(self) -> None:
        self.misbehaved = True
        self.ended = TOO_MUCH
        self.close()


def require_descriptors(count: int) -> None:
    """Raise where this process cannot open ``count`` more file descriptors.

    Raises:
        RunError: It cannot.
    """
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(count):
                descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, descriptor)
        except OSError as error:
            raise RunError(f"no connection to the exporter: {error.strerror}") from None


def _bytes_received(descriptor: int) -> int:
    """Return what the kernel received on a TCP connection; 0 where that is not known.

    The descriptor belongs to libzmq, which may have closed it by now: then another of its
    number is asked, which changes nothing.
    """
    if descriptor < 0:
        return 0
    form, offset = _BYTES_RECEIVED
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as own:
            info = own.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    return int(form.unpack_from(info, offset)[0]) if len(info) >= offset + form.size else 0
