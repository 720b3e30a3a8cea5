"""A sender's connection without keys, which does not use libzmq: no peer can end the process by it."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - of getaddrinfo, which imports it late: see link.py
import errno
import os
import select
import socket
from pathlib import Path
from typing import Any

from sidestep.errors import ConfigError, WireError
from sidestep.transport.addresses import IPC, TCP, host_and_port, is_host
from sidestep.transport.connect_problems import (
    HANDSHAKE_FAILED,
    KEYS,
    UNANSWERED,
    describe,
    describe_number,
)
from sidestep.transport.path_owners import check_owners
from sidestep.transport.peer_limits import SILENCE, TOO_MUCH, Allowance
from sidestep.transport.zmtp import OPENING, Parser, header

HANDSHAKE_TIMEOUT = 3.0
"""Seconds from the first attempt to connect until the handshake must be complete."""
_RECEIVE_BYTES = 16 << 10
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE // 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE // 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE * 1000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class PlainConnection:
    """One connection to an exporter, from the first attempt until it ends.

    Nothing blocks, except that a host's name is looked up.

    Args:
        attempt: Number of this attempt. Attempts take turns over the addresses of a host.

    Attributes:
        ended: Reason why the connection ended or could not be made; empty while it is usable.
        misbehaved: True if the peer broke the protocol, or sent too much, after the handshake.
    """

    def __init__(self, endpoint: str, now: float, attempt: int = 0) -> None:
        self.ended = ""
        self.misbehaved = False
        self._parser = Parser()
        self._allowance = Allowance(now)
        self._counted = self._received = 0
        """Frames taken from the allowance so far, and received bytes not yet taken from it."""
        self._unsent = b""
        self._deadline = now + HANDSHAKE_TIMEOUT
        self._connected = False
        self._path = Path(endpoint.removeprefix(IPC)) if endpoint.startswith(IPC) else None
        self._socket: socket.socket | None = None
        try:
            self._socket, address = _open(endpoint, attempt)
            error = self._socket.connect_ex(address)
        except OSError as failed:
            self._end(describe(failed))
            return
        if error not in (0, errno.EINPROGRESS):
            self._end(describe_number(error))

    @property
    def problem(self) -> str:
        """Reason why the peer cannot be reached; empty if none is known."""
        return self.ended

    @property
    def ready(self) -> bool:
        """True if messages can be sent."""
        return self._parser.ready and not self.ended

    def send(self, frame: bytes) -> bool:
        """Send ``frame`` if the connection takes it now; return whether it did."""
        if not self.ready or not self._flush():
            return False
        self._write(header(len(frame)), frame)
        return True

    def receive(self, now: float) -> bytes | None:
        """Return the next message, if there is one."""
        self.advance(now)
        return self._parse(now) if self.ready else None

    def advance(self, now: float) -> None:
        """Continue the handshake, and send the rest of a frame."""
        if self.ended:
            return
        if not self._connected:
            self._finish_connecting()
        if self._connected:
            self._flush()
        if not self._parser.ready:
            # An exporter sends no message before the sender's first one.
            self._parse(now)
        if not self._parser.ready and now >= self._deadline:
            self._end(UNANSWERED)

    def wait(self, seconds: float) -> None:
        """Wait until the connection can go on, for at most ``seconds``; not at all if negative."""
        if self._socket is None:
            return
        is_sending = not self._connected or bool(self._unsent)
        with contextlib.suppress(OSError, ValueError):
            poller = select.poll()
            poller.register(self._socket, select.POLLIN | (select.POLLOUT if is_sending else 0))
            # A negative timeout of poll() is endless.
            poller.poll(max(seconds, 0.0) * 1000)

    def close(self, seconds: float = 0.0) -> None:
        """End the connection; ``seconds`` is how long unsent bytes may take to leave."""
        if self._socket is None:
            return
        if self._unsent and seconds > 0:
            self._socket.settimeout(seconds)
            with contextlib.suppress(OSError):
                self._socket.sendall(self._unsent)
        self._end("closed")

    def _parse(self, now: float) -> bytes | None:
        while not self.ended:
            try:
                message = self._parser.next_message()
            except WireError as error:
                self._refuse(str(error).removeprefix(f"{error.reason}: "))
                return None
            self._reply()
            frames, self._counted = self._parser.frames - self._counted, self._parser.frames
            received, self._received = self._received, 0
            if not self._allowance.spend(frames, received, now):
                self._refuse(TOO_MUCH)
            elif message is not None:
                return message
            elif not self._read():
                return None
        return None

    def _finish_connecting(self) -> None:
        assert self._socket is not None
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        if not poller.poll(0):
            return
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._end(describe_number(error))
            return
        if self._path is not None:
            try:
                # Checked after connecting, since nobody can replace the socket of this connection.
                check_owners(self._path, {os.getegid(), *os.getgroups()})
            except OSError as unsafe:
                self._end(describe(unsafe))
                return
        self._connected = True
        self._unsent = OPENING

    def _reply(self) -> None:
        # A peer that does not read its answers gets no more of them.
        if self._parser.replies and self._flush():
            self._write(self._parser.replies)
        self._parser.replies = b""

    def _read(self) -> bool:
        """Read once; return whether bytes arrived."""
        if not self._connected or self._socket is None:
            return False
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(error.strerror or str(error))
            return False
        if not data:
            self._lose("the peer closed the connection")
            return False
        self._received += len(data)
        self._parser.feed(data)
        return True

    def _flush(self) -> bool:
        """Send the rest of the last frame; return whether nothing is left."""
        if self._unsent:
            unsent, self._unsent = self._unsent, b""
            self._write(unsent)
        return not self._unsent and not self.ended

    def _write(self, *parts: bytes) -> None:
        """Send ``parts``; keep the rest that the kernel does not take."""
        assert self._socket is not None
        try:
            sent = self._socket.sendmsg(parts)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        if sent < sum(map(len, parts)):
            self._unsent = b"".join(parts)[sent:]

    def _lose(self, cause: str) -> None:
        """End the connection, since the peer has ended it."""
        self._end(cause if self._parser.ready else f"{HANDSHAKE_FAILED} ({cause}): {KEYS}")

    def _refuse(self, reason: str) -> None:
        self.misbehaved = self._parser.ready
        self._end(reason)

    def _end(self, reason: str) -> None:
        self.ended = self.ended or reason
        if self._socket is not None:
            # A forked child may hold the descriptor, too, so that closing it alone would not suffice.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None


def _open(endpoint: str, attempt: int) -> tuple[socket.socket, Any]:
    """Return a socket that does not block, and the address to connect it to."""
    if endpoint.startswith(IPC):
        opened = socket.socket(socket.AF_UNIX)
        opened.setblocking(False)
        return opened, endpoint.removeprefix(IPC)
    if not endpoint.startswith(TCP):
        raise ConfigError(f"endpoint {endpoint!r}: must begin with ipc:// or tcp://")
    host, port = host_and_port(endpoint)
    if not is_host(host) or not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigError(f"endpoint {endpoint!r}: must be tcp://HOST:PORT")
    addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = addresses[attempt % len(addresses)]
    opened = socket.socket(family, kind, protocol)
    opened.setblocking(False)
    for option in _KEEPALIVE:
        opened.setsockopt(*option)
    return opened, address
