"""Servers to poll, of raw sockets: they answer as they are told to, also as none should."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable

Says = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PLAIN = "text/plain; charset=utf-8"


@dataclasses.dataclass
class Polled:
    """A running server.

    Attributes:
        says: What it does with the next question.
        asked: The heads of all requests.
        connections: How many there have been.
        busy: How many there are.
    """

    says: Says
    url: str = ""
    asked: list[str] = dataclasses.field(default_factory=list)
    connections: int = 0
    busy: int = 0
    _open: set[asyncio.StreamWriter] = dataclasses.field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        self.busy += 1
        self._open.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.asked.append(head)
                await self.says(reader, writer)
                await writer.drain()
                if "connection: close" in head.lower():
                    break
        self._open.discard(writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self.busy -= 1

    def hang_up(self) -> None:
        """End all connections at once."""
        for writer in self._open:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def polled(
    says: Says, tls: ssl.SSLContext | None = None, port: int = 0
) -> AsyncIterator[Polled]:
    """A server, on a free port unless it is given."""
    found = Polled(says)
    server = await asyncio.start_server(found.serve, "127.0.0.1", port, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    found.url = f"http{'s' if tls else ''}://127.0.0.1:{port}/metrics"
    async with server:
        yield found
        found.hang_up()
        while found.busy:
            await asyncio.sleep(0.005)


def head(length: int | None, status: str = "200 OK", kind: str = PLAIN, more: str = "") -> bytes:
    """The lines before a body."""
    size = "" if length is None else f"Content-Length: {length}\r\n"
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{size}{more}\r\n".encode()


def page(body: bytes | str, status: str = "200 OK", kind: str = PLAIN) -> Says:
    """Says ``body``, as one should."""
    data = body.encode() if isinstance(body, str) else body
    return raw(head(len(data), status, kind) + data)


def raw(*parts: bytes) -> Says:
    """Says exactly this; then, or instead, hangs up where the client asks for it."""

    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return say


def stall(*parts: bytes, every: float = 3600.0) -> Says:
    """Says each of these, and nothing for so many seconds after it."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in (*parts, b""):
            writer.write(part)
            await writer.drain()
            until = time.monotonic() + every
            while time.monotonic() < until:
                if reader.at_eof() or writer.transport.is_closing():
                    raise ConnectionResetError
                await asyncio.sleep(0.01)

    return say
