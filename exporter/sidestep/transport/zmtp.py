"""The connecting end of ZMTP 3.0 (RFC 23) with the NULL mechanism, without a socket.

An engine uses this instead of libzmq. libzmq aborts the process when a peer resets a connection at the
wrong moment, and it buffers a message without an end.
"""

from __future__ import annotations

import struct

from sidestep.errors import WireError
from sidestep.transport.connect_problems import KEYS
from sidestep.transport.peer_limits import MAX_ANSWER_BYTES

_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING_BYTES = 64
_MECHANISM = slice(12, 32)
_VERSION = 3
_SHORT_HEADER, _LONG_HEADER = 2, 9
_MAX_PING_CONTEXT = 16
_PING_TTL_BYTES = 2


def _command(name: bytes, data: bytes) -> bytes:
    body = bytes([len(name)]) + name + data
    return bytes([_COMMAND, len(body)]) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


_GREETING = (
    b"\xff" + bytes(8) + b"\x7f" + bytes([_VERSION, 0]) + b"NULL".ljust(20, b"\0") + bytes(32)
)
OPENING = _GREETING[:11]
"""First bytes of the connecting end: the signature and the version. The mechanism comes later: a libzmq
that asks for keys would close the connection at another mechanism before it names its own."""
_CONTINUATION = _GREETING[11:] + _command(b"READY", _property(b"Socket-Type", b"DEALER"))


def header(size: int) -> bytes:
    """Return the header of a single-frame message of ``size`` bytes."""
    return bytes([0, size]) if size < 256 else struct.pack(">BQ", _LONG, size)  # noqa: PLR2004


class Parser:
    """Parser of the bytes that the exporter sends on one connection.

    Attributes:
        replies: Bytes to send for the handshake and as answers to heartbeats; the caller clears it.
    """

    def __init__(self) -> None:
        self.ready = False
        self.replies = b""
        self.frames = 0
        self._greeted = False
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Append received bytes; parse them with ``next_message``."""
        self._buffer += data

    def next_message(self) -> bytes | None:
        """Return the next message, or ``None`` while more bytes are needed.

        Raises:
            WireError: The peer breaks the protocol, or is no exporter.
        """
        if not self._greeted and not self._read_greeting():
            return None
        while (found := self._next_frame()) is not None:
            flags, body = found
            if not flags & _COMMAND:
                if not self.ready:
                    raise WireError("bad_frame", "a message before the end of the handshake")
                return body
            self._obey(body)
        return None

    def _read_greeting(self) -> bool:
        start = bytes(self._buffer[:_GREETING_BYTES])
        # A server of another protocol may never send a whole greeting: its first bytes tell.
        if start[:1] not in (b"", b"\xff") or (len(start) > 9 and not start[9] & 1):  # noqa: PLR2004
            raise WireError(
                "bad_frame", "the peer does not speak ZMTP 3: is this an ingest endpoint?"
            )
        if len(start) > 10 and start[10] < _VERSION:  # noqa: PLR2004
            raise WireError("bad_frame", f"the peer speaks ZMTP {start[10]}")
        if len(start) < _GREETING_BYTES:
            return False
        mechanism = start[_MECHANISM].rstrip(b"\0")
        if mechanism != b"NULL":
            name = mechanism.decode("ascii", "replace")
            raise WireError("bad_frame", f"the peer asks for {name} keys: {KEYS}")
        del self._buffer[:_GREETING_BYTES]
        self._greeted = True
        self.replies += _CONTINUATION
        return True

    def _next_frame(self) -> tuple[int, bytes] | None:
        buffer = self._buffer
        if len(buffer) < _SHORT_HEADER:
            return None
        flags, size, start = buffer[0], buffer[1], _SHORT_HEADER
        if flags & ~(_LONG | _COMMAND):
            what = "a message of several frames" if flags == _MORE else f"frame flags {flags:#04x}"
            raise WireError("bad_frame", what)
        if flags & _LONG:
            if len(buffer) < _LONG_HEADER:
                return None
            size, start = int.from_bytes(buffer[1:_LONG_HEADER], "big"), _LONG_HEADER
        if size > MAX_ANSWER_BYTES:
            raise WireError("bad_frame", f"a frame of {size} bytes")
        if len(buffer) < start + size:
            return None
        body = bytes(buffer[start : start + size])
        del buffer[: start + size]
        self.frames += 1
        return flags, body

    def _obey(self, body: bytes) -> None:
        name_end = 1 + body[0] if body else 1
        name, data = body[1:name_end], body[name_end:]
        if name == b"READY":
            self.ready = True
        elif name == b"ERROR":
            reason = data[1:].decode("ascii", "replace")
            raise WireError("bad_frame", f"the peer refuses the handshake: {reason!r}")
        elif name == b"PING" and self.ready:
            context = data[_PING_TTL_BYTES : _PING_TTL_BYTES + _MAX_PING_CONTEXT]
            self.replies += _command(b"PONG", context)
