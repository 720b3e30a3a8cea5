"""What answering may cost: pages made at once, and memory for what clients do not take."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from sidestep.http.chunked_response import PIECE, PartsResponse
from sidestep.http.limits import Limits


class Overload(Exception):  # noqa: N818 - it is an answer, and no fault
    """Too much is under way."""


class ResponseLimiter:
    """Bounds the answers that are being made and sent."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._turns = asyncio.Semaphore(limits.concurrent_renders)
        self._waiting = 0
        self.unsent = 0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a place among those who make a page.

        Raises:
            Overload: Too many wait already.
        """
        if self._waiting >= self._limits.waiting_requests:
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
        """Send a long body, as the client takes it.

        Returns:
            A response that is sent, or ``response`` as it is, short or without a body.

        Raises:
            Overload: With it, too much would wait for clients.
        """
        body = response.body if isinstance(response, web.Response) else None
        if isinstance(body, bytes) and len(body) > PIECE:
            response = PartsResponse([body], response.headers, status=response.status)
        if not isinstance(response, PartsResponse) or request.method == "HEAD":
            return response
        if self.unsent + response.size > self._limits.unsent_bytes:
            raise Overload
        self.unsent += response.size
        try:
            await response.prepare(request)
            await response.write_eof()
        except ConnectionError:
            pass  # the client is gone: aiohttp meets the same, and ends without a word
        finally:
            self.unsent -= response.size
        return response
