"""`sidestep compare` of exporters: their last ten minutes."""

from __future__ import annotations

import asyncio
from subprocess import CompletedProcess

from aiohttp import web

from command_line import one_line, sidestep
from exporters import Start
from ports import free_port
from replays import replay
from web_servers import server

API = "/api/v1/{name:.+}"


async def compare(*arguments: object) -> CompletedProcess[str]:
    """Run the command beside the servers of the test."""
    return await asyncio.to_thread(sidestep, "compare", *arguments)


async def test_a_real_exporter_without_requests(start: Start) -> None:
    """An exporter that has none, or no timeline, is compared by a Prometheus."""
    async with start() as exporter:
        done = await compare(exporter.url, exporter.url)
    async with start(web_disable_timeline="true") as exporter:
        without = await compare(exporter.url, exporter.url)

    one_line(done, 2, "no engine has reported a request that ended in the last ten minutes")
    one_line(without, 2, "no exporter with /api/v1/timeline: of a Prometheus give a time range")


async def test_a_real_exporter_with_a_timeline(start: Start) -> None:
    """Its requests are compared one by one, with their parts."""
    async with start() as exporter:
        await replay(exporter, "core_aborts")
        done = await compare(exporter.url, exporter.url)

    assert done.returncode == 0
    assert "73 requests" in done.stdout
    assert "prefill" in done.stdout


async def test_errors_are_one_line() -> None:
    """Nothing there, another server, and an answer of another kind."""
    url = f"http://127.0.0.1:{free_port()}"
    one_line(await compare(url, url), 2, f"{url}: cannot connect: Connection refused")
    one_line(await compare("http://", url), 2, "must be a URL")

    async def answer(_: web.Request) -> web.Response:
        return web.json_response([1])

    async with server(answer, "/other") as other:
        one_line(await compare(other, other), 2, "of a Prometheus give a time range")
    async with server(answer, API) as odd:
        one_line(await compare(odd, odd), 2, f"{odd}: no answer of a sidestep exporter")
        one_line(await compare(f"{odd}@-1h/now", odd), 2, "no answer of a Prometheus")
