"""Limits on responses: concurrent renders, and memory for bytes that clients do not read."""

from __future__ import annotations

import asyncio

from aiohttp import web

from sidestep.http.chunked_response import PIECE, PartsResponse
from sidestep.http.limits import Limits


class Overload(Exception):  # noqa: N818 - a result, not an error
    """Too much is in progress."""


class ResponseLimiter:
    """Bounds the responses that are being rendered and sent."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.render_slots = asyncio.Semaphore(limits.concurrent_renders)
        """Concurrent renders; each connection has one request that waits for one, the first first."""
        self.unsent = 0

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
