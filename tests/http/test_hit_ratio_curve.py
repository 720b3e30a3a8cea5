"""The curve of the prefix cache over HTTP, of an engine that sends lookups."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from exporters import Start, until
from lookup_senders import CAPACITY, serve
from pages import get
from prefix_caches import BLOCK_SIZE
from sidestep.app.exporter import Exporter
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher

NAME = "test/m/0"


async def curves(exporter: Exporter, query: str = "") -> list[dict[str, Any]]:
    """Return the engines of the answer."""
    base = exporter.url.removesuffix("/metrics")
    found: list[dict[str, Any]] = json.loads(await get(f"{base}/api/v1/kv/curve{query}"))["engines"]
    return found


async def test_the_curve_has_bounds_and_the_present_size(start: Start) -> None:
    """Sizes double, the hit ratio grows, and the bounds enclose it; the exporter asks for lookups."""
    async with start(kv_sample_rate="1") as exporter:
        info = EngineInfo(NAME, "vllm", {"engine": "0", "model_name": "m"})
        publisher = Publisher(exporter.endpoints[0], "test", [info])
        await until(lambda: publisher.connected, 10, "the connection")
        assert await curves(exporter) == []
        cache = await asyncio.to_thread(serve, publisher)
        await until(lambda: publisher.drained, 20, "all items")
        publisher.close()
        (found,) = await curves(exporter)
        (same,) = await curves(exporter, f"?engine={NAME}")
        with pytest.raises(aiohttp.ClientResponseError, match="404"):
            await curves(exporter, "?engine=other")

    assert same["id"] == found["id"] == NAME
    assert found["block_size"] == BLOCK_SIZE
    assert found["capacity_blocks"] == CAPACITY
    assert abs(found["hit_ratio"] - cache.found / cache.tokens) < 0.001
    (present,) = [point for point in found["curve"] if point["capacity"] == 1.0]
    assert abs(present["hit_ratio"] - cache.found / cache.tokens) < 0.02
    assert present["bytes"] == CAPACITY << 20
    assert present["tokens"] == CAPACITY * BLOCK_SIZE
    ratios = [point["hit_ratio"] for point in found["curve"]]
    assert ratios == sorted(ratios)
    assert all(point["low"] <= point["hit_ratio"] <= point["high"] for point in found["curve"])


async def test_an_exporter_without_the_estimate_asks_for_no_lookups(start: Start) -> None:
    """With a half-life of 0 the engine does not send any."""
    async with start(kv_curve_half_life="0") as exporter:
        info = EngineInfo(NAME, "vllm", {"engine": "0", "model_name": "m"})
        publisher = Publisher(exporter.endpoints[0], "test", [info])
        await until(lambda: publisher.connected, 10, "the connection")
        assert publisher.lookup_key == b""
        publisher.close()


async def test_replicas_have_the_names_of_the_live_page(start: Start) -> None:
    """Their label is the same, so that only their identities tell them apart."""
    async with start() as exporter:
        url = exporter.url.removesuffix("/metrics")
        for name in ("a", "b"):
            await _serve_one(exporter, name)
        await until(lambda: _has_curves(exporter))
        answers = [json.loads(await get(f"{url}/api/v1/{name}")) for name in ("live", "timeline")]
        rows = [*(answer["engines"] for answer in answers), await curves(exporter)]
        (second,) = await curves(exporter, "?engine=b/m/0")

    assert [[row["engine"] for row in found] for found in rows] == 3 * [["a/m/0", "b/m/0"]]
    assert second["engine"] == "b/m/0"


async def _serve_one(exporter: Exporter, name: str) -> None:
    info = EngineInfo(f"{name}/m/0", "vllm", {"engine": "0", "model_name": "m"})
    publisher = Publisher(exporter.endpoints[0], name, [info])
    await until(lambda: publisher.connected)
    await asyncio.to_thread(serve, publisher)
    await asyncio.to_thread(publisher.close)


async def _has_curves(exporter: Exporter) -> bool:
    return len(await curves(exporter)) == 2
