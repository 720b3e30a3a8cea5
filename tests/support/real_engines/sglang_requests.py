"""Requests to a real SGLang server."""

from __future__ import annotations

import aiohttp


async def post(url: str) -> None:
    """Send an empty POST request, as SGLang's control endpoints take it."""
    async with aiohttp.ClientSession() as session, session.post(url) as answer:
        answer.raise_for_status()
