"""A request to a real SGLang server."""

from __future__ import annotations

import aiohttp


async def post(url: str) -> None:
    """Ask the server to do something."""
    async with aiohttp.ClientSession() as session, session.post(url) as answer:
        answer.raise_for_status()
