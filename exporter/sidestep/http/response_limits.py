"""Limits on responses: concurrent renders, and memory for bytes that clients do not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from sidestep.http.chunked_response import PIECE, PartsResponse
from sidestep.http.limits import Limits


class Overload(Exception):  # noqa: N818 - a result, not an error
    """Too much is in progress."""


class ResponseLimiter:
    """Bounds the responses that are being rendered and sent."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._render_slots = asyncio.Semaphore(limits.concurrent_renders)
        self._waiting = 0
        self.unsent = 0

    @contextlib.asynccontextmanager
    async def render_slot(self) -> AsyncIterator[None]:
        """Wait for one of the concurrent renders.

        Raises:
            Overload: Too many requests wait already.
        """
        if self._waiting >= self._limits.waiting_requests:
            raise Overload
        self._waiting += 1
        try:
            await self._render_slots.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._render_slots.release()

    async def send(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Send a long body as the client reads it.

        Returns:
            A response that is sent, or ``response`` unchanged if it is short or has no body.

        Raises:
            Overload: With it, too many bytes would wait for clients.
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
            pass  # the client has disconnected; aiohttp ends the connection silently
        finally:
            self.unsent -= response.size
        return response
