"""HTTP servers with one page each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from ports import free_port

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(handler: Handler, path: str = "/metrics", **site: Any) -> AsyncIterator[str]:
    """Run an HTTP server with one page."""
    app = web.Application()
    app.add_routes([web.get(path, handler)])
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port, **site).start()
    try:
        yield f"{'https' if site else 'http'}://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
