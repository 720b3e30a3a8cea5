"""What answering may cost: pages made at once, and memory for what clients do not take."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from sidestep.web.limits import Limits

PIECE = 64 * 1024


class Overload(Exception):  # noqa: N818 - it is an answer, and no fault
    """Too much is under way."""


class Answers:
    """Bounds the answers that are being made and sent."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._turns = asyncio.Semaphore(limits.making)
        self._waiting = 0
        self.unsent = 0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a place among those who make a page.

        Raises:
            Overload: Too many wait already.
        """
        if self._waiting >= self._limits.waiting:
            raise Overload
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turns.release()

    async def send(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Send a long body piece by piece, as the client takes it.

        In one piece the transport would copy what the client has not taken, for each client.

        Returns:
            A response that is sent, or ``response`` as it is, short or without a body.

        Raises:
            Overload: With it, too much would wait for clients.
        """
        body = response.body if isinstance(response, web.Response) else None
        if not isinstance(body, bytes) or len(body) <= PIECE or request.method == "HEAD":
            return response
        if self.unsent + len(body) > self._limits.unsent:
            raise Overload
        sent = web.StreamResponse(status=response.status, headers=response.headers)
        sent.content_length = len(body)
        self.unsent += len(body)
        try:
            await sent.prepare(request)
            view = memoryview(body)
            for start in range(0, len(body), PIECE):
                await sent.write(view[start : start + PIECE])
            await sent.write_eof()
        except ConnectionError:
            pass  # the client is gone: aiohttp meets the same, and ends without a word
        finally:
            self.unsent -= len(body)
        return sent
