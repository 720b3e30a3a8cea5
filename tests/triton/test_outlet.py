"""An outlet over streams, with a real exporter: who is named, when, and what arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import monotonic

import pytest

from conftest import Start, until
from sidestep.app import Exporter
from sidestep.engines.triton.wire import InferenceStats, ModelStats, Timed, TritonStats
from sidestep.metrics.computed_gauges import scalar
from sidestep.protocol import sender
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher import publisher as push
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.triton import stream_outlet
from sidestep_adapters.triton.stream_outlet import StreamOutlet

SERVER = EngineInfo("triton/s", "triton")


def version(model: str, **labels: str) -> EngineInfo:
    """One of the server."""
    return EngineInfo(f"triton/s/{model}/1", "triton", {"model": model, "version": "1", **labels})


def look(requests: int, stamp: float | None = None) -> TritonStats:
    """A model that has served so many."""
    inferences = InferenceStats(Timed(requests, 1000 * requests))
    now = monotonic() if stamp is None else stamp
    return TritonStats(0, now, now, ModelStats(1, requests, requests, inferences))


@asynccontextmanager
async def outlet(endpoint: str) -> AsyncIterator[StreamOutlet]:
    """One that ends as a process does that is told to."""

    def publish(number: int, infos: Sequence[EngineInfo]) -> Publisher:
        return Publisher(endpoint, f"n/s/triton{number}", infos, flush=0.01)

    made = StreamOutlet(SERVER, publish)
    try:
        yield made
    finally:
        await asyncio.gather(*(asyncio.to_thread(each.close) for each in made.publishers))


def served(exporter: Exporter, model: str) -> int:
    """Requests on the page."""
    engine = exporter.registry.engines.get(f"triton/s/{model}/1")
    return 0 if engine is None else int(scalar(engine, "nv_inference_request_success"))


def fed(exporter: Exporter) -> set[str]:
    """Engines that some stream feeds."""
    return {engine.id for engine in exporter.registry.engines.values() if engine.streams}


async def test_what_is_told_arrives(start: Start) -> None:
    """Of many versions, each under its own name; what leaves is not fed any more."""
    async with start() as exporter, outlet(exporter.endpoints[0]) as out:
        for count in (3, 5):
            for n in range(20):
                out.tell(version(f"m{n}"), look(count + n))
        await until(lambda: all(served(exporter, f"m{n}") == 5 + n for n in range(20)))
        names = {version(f"m{n}").id for n in range(20)}
        assert fed(exporter) == {SERVER.id, *names}
        assert out.engines.keys() == {SERVER.id, *names}

        out.tell(version("m3"), TritonStats(0, monotonic(), monotonic()))
        out.leave(version("m3").id)
        out.leave("nobody")
        await until(lambda: version("m3").id not in fed(exporter))
        assert exporter.registry.engines[version("m3").id].absent
        await until(lambda: version("m3").id not in out.engines)

        out.lost(0.0)
        await until(lambda: fed(exporter) == {SERVER.id})
        await until(lambda: out.engines.keys() == {SERVER.id})
        for n in range(20):
            out.tell(version(f"m{n}"), look(100))
        await until(lambda: fed(exporter) == {SERVER.id, *names})
        await until(lambda: served(exporter, "m4") == 100)
    assert exporter.metrics.value("sidestep_rejected_total", "unknown_engine") == 0


async def test_a_place_is_another_engines_once_all_is_safe(start: Start, tmp_path: Path) -> None:
    """Not while a snapshot has yet to hold what was told under it."""
    async with (
        start(state_dir=str(tmp_path / "state")) as exporter,
        outlet(exporter.endpoints[0]) as out,
    ):
        out.tell(version("a"), look(3))
        await until(lambda: served(exporter, "a") == 3)
        out.tell(version("a"), look(4))
        out.leave(version("a").id)
        assert version("a").id in out.engines
        await until(lambda: version("a").id not in out.engines, timeout=30)
        assert served(exporter, "a") == 4
        out.tell(version("b"), look(7))
        await until(lambda: served(exporter, "b") == 7)
        (stream,) = out._streams

        assert len(stream._infos) == 2
        assert served(exporter, "a") == 4


async def test_it_comes_back_as_another(start: Start) -> None:
    """Other labels are other series: until the old ones are left nothing is told of them."""
    async with start() as exporter, outlet(exporter.endpoints[0]) as out:
        out.tell(version("a", team="x"), look(3))
        await until(lambda: served(exporter, "a") == 3)
        out.leave(version("a").id)
        out.tell(version("a", team="y"), look(4))

        async def again() -> None:
            while exporter.registry.engines[version("a").id].labels.get("team") != "y":
                out.tell(version("a", team="y"), look(5))
                await asyncio.sleep(0.02)

        await asyncio.wait_for(again(), 10)
        await until(lambda: served(exporter, "a") == 5)


async def test_it_changes_its_mind(start: Start) -> None:
    """What is told again before its name has gone, has not gone."""
    async with start() as exporter, outlet(exporter.endpoints[0]) as out:
        out.tell(version("a"), look(3))
        out.doubt()
        out.tell(version("a"), look(4))
        await until(lambda: served(exporter, "a") == 4)
        await until(lambda: not out._streams[0].publisher._waiting)
        await asyncio.sleep(0.1)

        assert version("a").id in out.engines
        assert fed(exporter) == {SERVER.id, version("a").id}


async def test_many_take_several_streams(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many versions as there may be, and one stream's worth of places that are used again."""
    monkeypatch.setattr(stream_outlet, "MAX_ENGINES_PER_STREAM", 8)
    async with start() as exporter, outlet(exporter.endpoints[0]) as out:
        for n in range(20):
            out.tell(version(f"m{n}"), look(n + 1))
        await until(lambda: all(served(exporter, f"m{n}") == n + 1 for n in range(20)))
        assert len(out.publishers) == 3
        for part in range(5):
            for n in range(part * 4, part * 4 + 4):
                out.leave(version(f"m{n}").id)
            await until(lambda: version(f"m{part * 4}").id not in out.engines)  # noqa: B023
            for n in range(part * 4, part * 4 + 4):
                out.tell(version(f"new{n}"), look(n + 2))
        await until(lambda: all(served(exporter, f"new{n}") == n + 2 for n in range(20)))

        assert len(out.publishers) == 3
    assert exporter.metrics.value("sidestep_rejected_total", "bad_item") == 0


async def test_a_full_ring_loses_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While there is no exporter looks are folded, models that begin anew among them."""
    monkeypatch.setattr(push, "Sender", partial(sender.Sender, ring_bytes=2000))
    async with outlet(f"ipc://{tmp_path}/ingest.ipc") as out:
        async with start() as exporter:
            out.tell(version("a"), look(10))
            await until(lambda: served(exporter, "a") == 10)
        for count in (*range(11, 300), *range(1, 200)):
            out.tell(version("a"), look(count))
            if not count % 50:
                await asyncio.sleep(0.02)
        out.leave(version("a").id)
        async with start() as exporter:
            await until(lambda: served(exporter, "a") == 299 + 199, timeout=20)
            await until(lambda: fed(exporter) == {SERVER.id}, timeout=20)
        assert out.publishers[0].folded > 100
        assert out.publishers[0].dropped == 0
