"""A router of a service whose prefill and decode are separate, and its clients' books."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

PARAMS = "kv_transfer_params"


@dataclasses.dataclass
class Books:
    """The books of the service's clients: what they have asked for and got."""

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


@contextlib.asynccontextmanager
async def proxy(prefill: str, decode: str) -> AsyncIterator[str]:
    """Yield the address of a proxy that has prompts computed at one server and continued at another.

    Both get the client's ``X-Request-Id``, as from the routers of vLLM and llm-d.
    """

    async def completions(request: web.Request) -> web.Response:
        asked = await request.json()
        headers = {"X-Request-Id": request.headers["X-Request-Id"]}
        first = {**asked, "max_tokens": 1, PARAMS: {"do_remote_decode": True}}
        async with session.post(f"{prefill}/v1/completions", json=first, headers=headers) as answer:
            params = (await answer.json()).get(PARAMS) or {"do_remote_prefill": True}
        second = {**asked, PARAMS: params}
        async with session.post(f"{decode}/v1/completions", json=second, headers=headers) as answer:
            return web.json_response(await answer.json(), status=answer.status)

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    # Servers close connections that were idle, at the moment at which another request is sent on them.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()


async def ask(
    session: aiohttp.ClientSession, base: str, name: str, books: Books, prompt: tuple[str, int]
) -> None:
    """Ask for tokens after a prompt, and write into ``books`` what the service answers."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt[0],
        "max_tokens": prompt[1],
        "ignore_eos": True,
    }
    headers = {"X-Request-Id": name}
    async with session.post(f"{base}/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        usage = (await answer.json())["usage"]
    books.requests += 1
    books.prompt_tokens += usage["prompt_tokens"]
    books.generation_tokens += usage["completion_tokens"]
