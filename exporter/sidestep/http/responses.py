"""HTTP responses in parts, which are never joined because pages are long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web

PIECE = 64 * 1024
"""Bytes per write: the transport copies what a client has not read yet, for each client."""
SLICE = 0.0015
"""Seconds of writing before yielding to the event loop: the kernel may accept a lot at once."""


class PartsResponse(web.StreamResponse):
    """Sends ``parts`` one after the other as the client reads them, with a Content-Length."""

    def __init__(
        self, parts: Sequence[bytes], headers: Mapping[str, str], status: int = 200
    ) -> None:
        super().__init__(status=status, headers=headers)
        self.parts = parts
        self.size = self.content_length = sum(map(len, parts))
        self._begun = False

    async def write_eof(self, data: bytes = b"") -> None:
        """Send the parts, once."""
        if not self._begun and self._req is not None and self._req.method != "HEAD":
            self._begun = True
            since = time.perf_counter()
            for piece in pieces(self.parts):
                await self.write(piece)
                if time.perf_counter() - since > SLICE:
                    await asyncio.sleep(0)
                    since = time.perf_counter()
        await super().write_eof(data)


def pieces(parts: Sequence[bytes]) -> Iterator[Any]:
    """Yield ``parts`` in pieces of similar length: short parts joined, long ones cut."""
    waiting: list[bytes] = []
    size = 0
    for part in parts:
        if len(part) <= PIECE // 4 and size + len(part) <= PIECE:
            waiting.append(part)
            size += len(part)
            continue
        if waiting:
            yield b"".join(waiting)
            waiting, size = [], 0
        view = memoryview(part)
        for start in range(0, len(part), PIECE):
            yield view[start : start + PIECE]
    if waiting:
        yield b"".join(waiting)
