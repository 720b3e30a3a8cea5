"""The recent steps and requests of engines: their bounds, and the route that returns them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from exporter_processes import process
from exporters import Start, until
from pages import get
from replays import replay
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.sglang.wire import SglangRequest, SglangRequests
from sidestep.metrics import timeline
from sidestep.metrics.registry import Registry, Tracking
from sidestep.metrics.timeline import UNKNOWN_LIMIT, Timeline
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.request_events import LIMITS
from sidestep.tracking.requests.inflight import Request
from sidestep.tracking.requests.outcomes import EndedRequest, IterationShape
from sidestep_adapters.publisher.publisher import Publisher


def step(wall: float, limit: int | None = 0, tokens: int = 5) -> IterationShape:
    """Return a step of two requests."""
    return IterationShape(0.01, None, 1, tokens, 1, 1, 0, 0, wall, limit)


def ended(number: int) -> EndedRequest:
    """Return a request that ended."""
    return EndedRequest(number, 1, Request(0.0), "stop", 1.0)


def test_old_steps_and_requests_are_removed() -> None:
    """By the time at which they were received, whatever the engine's clock says."""
    one = Timeline()
    for at in range(20):
        one.add_steps([step(1e9 - at), step(5.0)], 1000.0 + at)
        one.add_request(ended(at), 1000.0 + at)

    one.trim(1015.0, 1)

    assert [*one.steps.received] == [at for at in range(1015, 1020) for _ in range(2)]
    assert [*one.steps.end][:2] == [1e9 - 15, 5.0]
    assert len({len(column) for column in one.steps}) == 1
    assert [kept.ended.number for kept in one.requests] == [*range(15, 20)]


def test_engines_share_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first; between two checks an engine may have all."""
    monkeypatch.setattr(timeline, "MAX_STEPS", 64)
    monkeypatch.setattr(timeline, "MAX_REQUESTS", 8)
    tracking = Tracking(keeps_timeline=True)
    registry = Registry(DIALECTS.layouts(), tracking=tracking, wall=lambda: 1.0)
    engines = [
        registry.register(EngineInfo(name, "vllm", {"engine": name, "model_name": "m"}))
        for name in "ab"
    ]
    for engine in engines:
        for at in range(100):
            engine.part(Timeline).add_steps([step(float(at))], 1.0)
            engine.part(Timeline).add_request(ended(at), 1.0)
            assert len(engine.part(Timeline).steps.end) <= 64
        assert len(engine.part(Timeline).requests) == 8

    registry.expire(0.0)

    for engine in engines:
        assert [*engine.part(Timeline).steps.end] == [float(at) for at in range(68, 100)]
        assert [kept.ended.number for kept in engine.part(Timeline).requests] == [*range(96, 100)]


def test_numbers_of_a_newer_or_a_hostile_sender_are_bounded() -> None:
    """An unknown limit is no limit, and no number is too large for its column."""
    one = Timeline()
    one.add_steps([step(1.0, len(LIMITS), 1 << 60), step(1.0, None), step(1.0, 3)], 1.0)

    assert [*one.steps.limit] == [UNKNOWN_LIMIT, UNKNOWN_LIMIT, 3]
    assert one.steps.prefill_tokens[0] == (1 << 32) - 1


async def answer(url: str, query: str = "") -> list[dict[str, Any]]:
    """Return the engines of an exporter's answer."""
    text = await get(f"{url.removesuffix('/metrics')}/api/v1/timeline{query}")
    found = json.loads(text)
    assert found["limits"] == list(LIMITS)
    engines: list[dict[str, Any]] = found["engines"]
    return engines


async def test_the_route_returns_a_recorded_run(start: Start) -> None:
    """It has as many steps and requests as the engine ran, of the engine that is asked for."""
    async with start() as exporter:
        await replay(exporter, "core_aborts")
        (engine,) = await answer(exporter.url)
        (same,) = await answer(exporter.url, f"?engine={engine['id']}&minutes=1")
        (few,) = await answer(exporter.url, "?slowest=3")
        for query, status in (
            ("?slowest=99", 400),
            ("?engine=x", 404),
            ("?minutes=0", 400),
            ("?minutes=x", 400),
        ):
            with pytest.raises(aiohttp.ClientResponseError, match=str(status)):
                await answer(exporter.url, query)

    # Its state may change between the answers.
    assert {**same, "state": ""} == {**engine, "state": ""}
    slowest = sorted(engine["requests"], key=lambda record: -record["e2e_seconds"])[:3]
    assert few["requests"] == slowest
    assert not any(few["steps"].values())
    assert {len(column) for column in engine["steps"].values()} == {2338}
    assert len(engine["requests"]) == 73
    assert all(record["parts"] for record in engine["requests"])
    # Their longest gaps cost time for each token, so that only records in a file have them.
    assert {record["max_itl_seconds"] for record in engine["requests"]} == {None}


CLOCK = """
import pathlib, time
clock = time.time
time.time = lambda: clock() + float(pathlib.Path(__file__).with_name("ahead").read_text())
"""
"""A wall clock that a test can set while a process runs."""


async def test_a_wall_clock_that_is_set_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recent stays so if it jumps ahead."""
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    (tmp_path / "ahead").write_text("0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with process(tmp_path) as (_, url):
        await replay(f"ipc://{tmp_path}/i.ipc", "core_aborts")
        (before,) = await answer(url)
        (tmp_path / "new").write_text("3600")
        (tmp_path / "new").replace(tmp_path / "ahead")
        (after,) = await answer(url, "?minutes=9")

    assert len(before["steps"]["end"]) == 2338
    assert after["steps"] == before["steps"]
    assert after["requests"] == before["requests"]


async def test_sglangs_requests_are_kept(start: Start) -> None:
    """Its requests end without steps."""
    request = SglangRequest(1, 1e9, 10.0, 11.5, "stop", queued=10.1, scheduled=10.2, first=10.3)
    info = EngineInfo("s", "sglang", {"engine_type": "unified", "model_name": "m"})
    async with start() as exporter:
        publisher = Publisher(exporter.endpoints[0], "s", [info], flush_interval=0.01)
        publisher.push(SglangRequests(0, 1.0, 1, [request]))
        await until(lambda: publisher.drained)
        (engine,) = await answer(exporter.url)
        await asyncio.to_thread(publisher.close)

    assert (engine["dialect"], engine["steps"]["end"]) == ("sglang", [])
    assert [record["e2e_seconds"] for record in engine["requests"]] == [1.5]


async def test_the_flag_switches_it_off(start: Start) -> None:
    """Nothing is kept, and there is no route."""
    async with start(web_disable_timeline="true") as exporter:
        await replay(exporter, "core_aborts")
        with pytest.raises(aiohttp.ClientResponseError, match="404"):
            await answer(exporter.url)
        engines = exporter.registry.engines.values()
        assert [engine.find_part(Timeline) for engine in engines] == [None] * len(engines)
