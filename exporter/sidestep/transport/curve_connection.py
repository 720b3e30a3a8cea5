"""A sender's connection with keys, over libzmq."""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import struct

import zmq

from sidestep.errors import ConfigError, RunError
from sidestep.transport.client_socket import ConnectionMonitor, Socket, dealer
from sidestep.transport.keys import Keys
from sidestep.transport.peer_limits import TOO_MUCH, Allowance

_OPTIONS = (
    # Otherwise frames would queue for a connection that may never be made, or be old when it is.
    (zmq.IMMEDIATE, 1),
    (zmq.SNDHWM, 64),
    (zmq.RECONNECT_IVL, 50),
    (zmq.RECONNECT_IVL_MAX, 1000),
)
_DESCRIPTORS = 16
"""File descriptors of a context, a socket and a monitor; without them libzmq ends the process."""
_TCP_INFO_BYTES = 256
_BYTES_RECEIVED = struct.Struct("Q"), 128
"""``tcpi_bytes_received`` in Linux's ``struct tcp_info``, and its offset."""


class CurveConnection:
    """A sender's connection with keys, by libzmq, which reconnects by itself.

    Only the owner of the exporter's secret key can send anything over it. Even the owner may send only
    so much: the kernel's count of received bytes is compared with an allowance.

    Attributes:
        ended: Reason why the connection ended; empty while it is usable.
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
            self._socket = dealer(self._context, keys)
            for option, value in _OPTIONS:
                self._socket.setsockopt(option, value)
            self._monitor = ConnectionMonitor(self._socket, endpoint)
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"endpoint {endpoint!r}: {error.strerror}") from None

    @property
    def ready(self) -> bool:
        """True if messages can be sent."""
        return self._monitor.connected and not self.ended

    @property
    def problem(self) -> str:
        """Reason why the peer cannot be reached; empty if none is known."""
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
        message = self._next_message()
        if message is not None and not self._allowance.spend(1, 0, now):
            self._refuse()
        return message

    def _next_message(self) -> bytes | None:
        """Return the next message, if there is one; drop messages of several frames."""
        # There is rarely a message, and to ask for one costs less than an exception.
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if not self._socket.getsockopt(zmq.RCVMORE):
                return frame
            self._socket.recv_multipart(zmq.NOBLOCK)
        return None

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
        """Wait until there may be a message, for at most ``seconds``; not at all if negative."""
        if not self.ended:
            # A negative time is endless for libzmq's poll and linger.
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
    """Check that this process can open ``count`` more file descriptors."""
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(count):
                descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, descriptor)
        except OSError as error:
            raise RunError(f"no connection to the exporter: {error.strerror}") from None


def _bytes_received(descriptor: int) -> int:
    """Return how many bytes the kernel has received on a TCP connection; 0 where that is not known.

    libzmq may have closed its descriptor by now. Then the count is that of another file, or 0.
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
