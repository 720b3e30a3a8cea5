"""`sidestep compare` of exporters: their last ten minutes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from subprocess import CompletedProcess
from typing import Any

import msgspec
import pytest
from aiohttp import web

from command_line import one_line, sidestep
from exporters import Start
from played_runs import Played
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


@pytest.mark.parametrize(
    ("more", "code", "verdict"),
    [
        ({}, 0, "no difference seen"),
        ({"slower": 6.0}, 1, "worse"),
        ({"longer": 2.0}, 3, "not comparable"),
    ],
)
def test_two_exporters(more: dict[str, Any], code: int, verdict: str) -> None:
    """Buckets are coarse: a latency must leave its bucket to be seen, and load is known by its mean."""

    async def compared() -> CompletedProcess[str]:
        async with answering(before) as a, answering(after) as b:
            return await compare(a, b, "--json")

    before, after = (Played(run(1, 1200)).answers(), Played(run(2, 1200, **more)).answers())
    done = asyncio.run(compared())

    found = json.loads(done.stdout)
    assert (found["verdict"], done.returncode) == (verdict, code), found["reason"]
    rows = {row["quantity"]: row for row in found["rows"]}
    means = [one.prompt_tokens for one in run(1, 1200)]
    assert rows["prompt tokens, mean"]["a"][0] == pytest.approx(sum(means) / len(means), rel=0.01)
    assert rows["requests/s"]["a"][0] == pytest.approx(10, rel=0.1)
    assert {"TTFT p95", "ITL p50", "e2e p99", "output tokens/s"} <= rows.keys()


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


async def test_a_real_exporter(start: Start) -> None:
    """A history of a few seconds has numbers, and no intervals yet; it is read without a timeline."""
    async with start(web_disable_timeline="true") as exporter:
        await replay(exporter, "core_aborts")
        async with asyncio.timeout(60):
            # Its history begins with the first sample, and has an interval every five seconds.
            while (done := await compare(exporter.url, exporter.url)).returncode == 2:
                assert "no request has ended" in done.stderr
                await replay(exporter, "core_aborts")
        other = await compare(f"{exporter.url}{{engine=x}}", exporter.url)
        label = await compare(f"{exporter.url}{{pod=x}}", exporter.url)

    assert done.returncode == 3
    assert "too few requests or scrapes" in done.stdout
    one_line(other, 2, "no such engine that reports latencies")
    one_line(label, 2, "selected by engine=NAME only")


async def test_a_real_exporter_with_a_timeline(start: Start) -> None:
    """Its requests are compared one by one, with their parts."""
    async with start() as exporter:
        await replay(exporter, "core_aborts")
        done = await compare(exporter.url, exporter.url)

    assert done.returncode == 0
    assert "73 requests" in done.stdout
    assert "prefill" in done.stdout


async def test_several_kinds_of_engines(start: Start) -> None:
    """They are one error, which says how to select."""
    async with start(web_disable_timeline="true") as exporter:
        await replay(exporter, "core_aborts")
        await replay(exporter, "sglang", "other")
        done = await compare(exporter.url, exporter.url)

    one_line(done, 2, "several kinds of engines (sglang, vllm): select one engine, as in")


async def test_errors_are_one_line() -> None:
    """Nothing there, another server, and an answer of another kind."""
    url = f"http://127.0.0.1:{free_port()}"
    one_line(await compare(url, url), 2, f"{url}: cannot connect: Connection refused")
    one_line(await compare("http://", url), 2, "must be a URL")

    async def answer(_: web.Request) -> web.Response:
        return web.json_response([1])

    history = {"times": [1.0, 2.0], "series": {"finished": [1.0]}, "heatmaps": []}
    heat = {"name": "ttft", "bounds": [1.0], "counts": [[1]]}
    for wrong in (history, history | {"times": [1.0], "heatmaps": [heat]}):
        answers = {
            "/api/v1/live": b'{"engines": [{"id": "a", "engine": "a", "dialect": "vllm"}]}',
            "/api/v1/live/history": json.dumps(wrong).encode(),
        }
        async with answering(answers) as odd:
            done = await compare(odd, odd)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"sidestep: {odd}: ")
        assert len(done.stderr.splitlines()) == 1
    async with server(answer, "/other") as other:
        one_line(await compare(other, other), 2, "of a Prometheus give a time range")
    async with server(answer, API) as odd:
        one_line(await compare(odd, odd), 2, f"{odd}: no answer of a sidestep exporter")
        one_line(await compare(f"{odd}@-1h/now", odd), 2, "no answer of a Prometheus")
