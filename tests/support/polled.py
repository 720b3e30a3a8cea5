"""HTTP servers on raw sockets, whose answers a test sets, malformed ones included."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from exporters import until

Says = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PLAIN = "text/plain; charset=utf-8"


class Polled:
    """A server, which keeps its port when it is started again.

    Attributes:
        says: Function that answers each request.
        heads: Request line and headers of every request.
        connections: Connections accepted so far.
        busy: Requests being answered now.
        most: Highest ``busy`` so far.
    """

    def __init__(self, says: Says, path: str = "", port: int = 0) -> None:
        self.says = says
        self.port = port
        self._path = path
        self._scheme = "http"
        self.heads: list[str] = []
        self.connections = self.busy = self.most = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """URL of the server, with the path that it was made with."""
        return f"{self._scheme}://127.0.0.1:{self.port}{self._path}"

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen."""
        self._scheme = "https" if tls else "http"
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close the port and reset all connections, as a kill by SIGKILL does."""
        if self._server is not None:
            self._server.close()
        self._server = None
        self.hang_up()
        await until(lambda: not self._open)

    def hang_up(self) -> None:
        """Reset all connections."""
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:
            # It was accepted just before the port was closed.
            writer.transport.abort()
            return
        self.connections += 1
        self._open.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                self.busy += 1
                self.most = max(self.most, self.busy)
                try:
                    await self.says(reader, writer)
                    await writer.drain()
                finally:
                    self.busy -= 1
                if "connection: close" in head.lower():
                    break
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self._open.discard(writer)


@contextlib.asynccontextmanager
async def polled(
    says: Says, tls: ssl.SSLContext | None = None, port: int = 0
) -> AsyncIterator[Polled]:
    """Run a server whose URL is that of a metrics page, on a free port unless it is given."""
    server = Polled(says, "/metrics", port)
    await server.start(tls)
    try:
        yield server
    finally:
        await server.stop()


def answer(body: bytes, status: str = "200 OK", kind: str = PLAIN) -> bytes:
    """Return a whole answer with ``body``."""
    return head(len(body), status, kind) + body


def head(length: int | None, status: str = "200 OK", kind: str = PLAIN, more: str = "") -> bytes:
    """Return status line and headers; no ``Content-Length`` where ``length`` is None."""
    size = "" if length is None else f"Content-Length: {length}\r\n"
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{size}{more}\r\n".encode()


def page(body: bytes | str, status: str = "200 OK", kind: str = PLAIN) -> Says:
    """Answer with ``body``."""
    return raw(answer(body.encode() if isinstance(body, str) else body, status, kind))


def raw(*parts: bytes) -> Says:
    """Answer with these bytes, whether they are HTTP or not."""

    async def write(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return write


def stall(*parts: bytes, every: float = 3600.0) -> Says:
    """Send each part and then nothing for ``every`` seconds; end when the client goes."""

    async def write(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in (*parts, b""):
            writer.write(part)
            await writer.drain()
            until = time.monotonic() + every
            while time.monotonic() < until:
                if reader.at_eof() or writer.transport.is_closing():
                    raise ConnectionResetError
                await asyncio.sleep(0.01)

    return write
