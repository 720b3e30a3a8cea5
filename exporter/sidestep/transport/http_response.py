"""HTTP responses with a limit on the informational responses before them."""

from __future__ import annotations

from typing import Any

import aiohttp
from aiohttp.connector import Connection

MAX_INFORMATIONAL = 8
"""Responses such as ``100 Continue`` that may come before the response."""


class BoundedResponse(aiohttp.ClientResponse):
    """A response class for ``ClientSession`` that refuses many informational responses.

    aiohttp reads informational responses without a limit: a server could hold the event loop with them.
    """

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """Read the head of the response."""
        protocol: Any = connection.protocol
        read, left = protocol.read, MAX_INFORMATIONAL

        async def read_one() -> Any:
            nonlocal left
            if left < 0:
                raise aiohttp.ClientError(f"more than {MAX_INFORMATIONAL} informational responses")
            left -= 1
            return await read()

        protocol.read = read_one
        try:
            return await super().start(connection)
        finally:
            del protocol.read
