"""Probes of engines over HTTP: states, status codes and stacks, as a kubelet and a person read them."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from exporters import Start, until
from pages import get
from reporting_processes import WORKING, process
from sidestep.app.exporter import Exporter
from sidestep.protocol.progress import ASLEEP, STARTING, Progress

ID = "ns/m/0"
STACK = ["vllm/core.py:10 run", "vllm/lock.py:5 acquire"]
STUCK = Progress(0, steps=5, unfinished=2, step_age=60.0, stack=STACK)


async def probe(url: str, path: str) -> tuple[int, Any]:
    """Return status and JSON of a page, or its text if it has no JSON."""
    to = url.removesuffix("/metrics") + path
    async with aiohttp.ClientSession() as session, session.get(to) as answer:
        is_json = answer.content_type == "application/json"
        return answer.status, await (answer.json() if is_json else answer.text())


async def states(exporter: Exporter) -> dict[str, str]:
    """Return the states of all engines."""
    _, found = await probe(exporter.url, "/-/engines")
    return {engine["id"]: engine["state"] for engine in found["engines"]}


async def reach(exporter: Exporter, state: str, engine: str = ID) -> None:
    """Wait until the engine is in this state."""

    async def is_reached() -> bool:
        return (await states(exporter)).get(engine) == state

    await until(is_reached, 45.0, state)


async def test_a_stalled_engine_fails_its_probe_and_shows_its_stack(start: Start) -> None:
    """The other engines pass theirs; the probe of all fails."""
    async with start() as exporter, process(exporter) as one, process(exporter, "b", "b", 2):
        await reach(exporter, "ok")
        await reach(exporter, "ok", "b")
        assert await probe(exporter.url, "/-/engines?ready") == (200, {
            "engines": [
                {
                    "id": name, "state": "ok", "reason": None, "seconds": 0.0,
                    "step_age_seconds": pytest.approx(0.05, abs=2.0), "unfinished_requests": 2,
                    "stream": None,
                }
                for name in (ID, "b")
            ]
        })  # fmt: skip
        status, text = await probe(exporter.url, f"/api/v1/engines/{ID}/stack")
        assert (status, text) == (404, f"no stack: engine {ID} is ok\n")

        one.progress = [STUCK]
        await reach(exporter, "stalled")
        status, found = await probe(exporter.url, f"/-/engines/{ID}")
        assert status == 503
        assert (found["id"], found["state"], found["reason"]) == (ID, "stalled", "step")
        assert found["stream"] == "core"
        assert 60.0 <= found["seconds"] <= 63.0
        assert (await probe(exporter.url, "/-/engines"))[0] == 503
        assert (await probe(exporter.url, "/-/engines/b?ready"))[0] == 200
        stack = await probe(exporter.url, f"/api/v1/engines/{ID}/stack")
        assert stack == (200, "vllm/core.py:10 run\nvllm/lock.py:5 acquire\n")
        listed = json.loads(await get(exporter.url.replace("/metrics", "/api/v1/engines")))
        assert [(e["state"], e["reason"]) for e in listed] == [("stalled", "step"), ("ok", None)]

        one.progress = [WORKING]
        await reach(exporter, "ok")
        assert (await probe(exporter.url, "/-/engines"))[0] == 200
        assert (await probe(exporter.url, f"/api/v1/engines/{ID}/stack"))[0] == 404


@pytest.mark.parametrize(
    ("condition", "state"), [(STARTING, "starting"), (ASLEEP, "asleep")], ids=["start", "sleep"]
)
async def test_an_engine_that_serves_nothing_on_purpose_is_alive_and_not_ready(
    start: Start, condition: str, state: str
) -> None:
    """A liveness probe must not kill an engine that loads its model."""
    async with start() as exporter, process(exporter) as one:
        one.progress = [Progress(0, condition=condition)]
        await reach(exporter, state)

        for path in ("/-/engines", f"/-/engines/{ID}"):
            assert (await probe(exporter.url, path))[0] == 200
            assert (await probe(exporter.url, f"{path}?ready"))[0] == 503
            assert (await probe(exporter.url, f"{path}?ready=1"))[0] == 503


async def test_paths_that_name_no_engine(start: Start) -> None:
    """One line says so; without engines nothing is ready, and nothing is broken."""
    async with start() as exporter:
        for path in ("/-/engines/x", "/-/engines/a/b%20c", "/api/v1/engines/x/stack"):
            status, text = await probe(exporter.url, path)
            assert (status, text) == (404, "no such engine; /-/engines lists all\n")
        assert await probe(exporter.url, "/-/engines") == (200, {"engines": []})
        assert await probe(exporter.url, "/-/engines?ready") == (503, {"engines": []})


@pytest.mark.parametrize("name", ["a b/ü/%2F?#", "triton/http://h:1/m/1", "x/stack", "//"])
async def test_identities_with_any_characters(start: Start, name: str) -> None:
    """A client encodes them; slashes may stay as they are."""
    async with start() as exporter, process(exporter, name) as one:
        one.progress = [STUCK]
        await reach(exporter, "stalled", name)
        text = "".join(c if c.isalnum() or c == "/" else f"%{c.encode().hex()}" for c in name)
        text = text.replace("ü", "%c3%bc")

        status, found = await probe(exporter.url, f"/-/engines/{text}")
        assert (status, found["id"]) == (503, name)
        assert (await probe(exporter.url, f"/api/v1/engines/{text}/stack"))[0] == 200
