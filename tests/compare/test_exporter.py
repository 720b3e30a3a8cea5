"""`sidestep compare` of exporters: their last ten minutes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from subprocess import CompletedProcess

import msgspec
from aiohttp import web

from command_line import one_line, sidestep
from exporters import Start
from ports import free_port
from replays import replay
from request_runs import run
from web_servers import server

API = "/api/v1/{name:.+}"


async def compare(*arguments: object) -> CompletedProcess[str]:
    """Run the command beside the servers of the test."""
    return await asyncio.to_thread(sidestep, "compare", *arguments)


@contextlib.asynccontextmanager
async def answering(answers: Mapping[str, bytes]) -> AsyncIterator[str]:
    """Serve answers of an exporter, by their paths."""

    async def answer(request: web.Request) -> web.Response:
        if request.path not in answers:
            return web.Response(status=404)
        return web.Response(body=answers[request.path], content_type="application/json")

    async with server(answer, API) as url:
        yield url


async def test_exporters_with_requests() -> None:
    """Requests are compared one by one, and labels select them as in a log."""
    records = [run(1), run(2, slower=1.5, model="other")]
    engines = [{"id": "e", "requests": few} for few in records]
    answer = msgspec.json.encode({"engines": engines, "limits": []})
    async with answering({"/api/v1/timeline": answer}) as url:
        done = await compare(f"{url}{{model=m}}", f"{url}{{model=other}}", "--json")

    found = json.loads(done.stdout)
    assert (found["verdict"], done.returncode) == ("worse", 1)
    assert found["a"]["extent"].startswith("m, 400 requests")
    assert any(row["quantity"] == "ITL of a request p95" for row in found["rows"])


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
