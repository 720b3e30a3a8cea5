"""The answers of the live page's endpoints: a real exporter, fed over sockets, read over HTTP."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from command_line import sidestep
from exporters import MAIN_RUN, Start, until
from pages import Family, get, parse
from replays import replay
from sidestep import __version__
from sidestep.app.exporter import Exporter
from sidestep.engines.sglang.wire import QueueCount, SglangSchedulerStats, SglangStats
from sidestep.engines.vllm.wire import SchedulerStats as VllmStats
from sidestep.engines.vllm.wire import VllmStep
from sidestep.exposition.live import answers
from sidestep.exposition.live.answers import HistoryAnswer, Live
from sidestep.exposition.live.view import LiveView
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import CORE, Bye, EngineInfo, Heartbeat, Hello
from sidestep.protocol.progress import Progress
from socket_peers import batch, connect

PROMETHEUS = {"X-Prometheus-Scrape-Timeout-Seconds": "10"}


def base(exporter: Exporter) -> str:
    """Return scheme, host and port."""
    return exporter.url.removesuffix("/metrics")


async def live(exporter: Exporter) -> Live:
    """Return the answer of ``/api/v1/live``."""
    return msgspec.json.decode(await get(f"{base(exporter)}/api/v1/live"), type=Live)


async def newer(exporter: Exporter, before: Live | None = None) -> Live:
    """Return an answer that was rendered after ``before``, or after this call."""
    before = before or await live(exporter)
    found: list[Live] = []

    async def is_newer() -> bool:
        found.append(await live(exporter))
        return found[-1].time > before.time

    await until(is_newer, 10.0, "a newer answer")
    return found[-1]


async def status(exporter: Exporter, path: str, **headers: str) -> tuple[int, str]:
    """Return status and text of a page."""
    url = base(exporter) + path
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, await answer.text()


def values(page: dict[str, Family], name: str, **labels: str) -> dict[str, float]:
    """Return the sums of a family's samples by engine, of those with ``labels``."""
    found: dict[str, float] = {}
    for (sample, key), value in page[name.removesuffix("_total")].samples.items():
        if sample == name and labels.items() <= dict(key).items():
            engine = dict(key).get("engine", "")
            found[engine] = found.get(engine, 0.0) + value
    return found


async def test_the_answer_equals_the_metrics_page(start: Start) -> None:
    """Gauges and the exporter's own health, at the same moment."""
    async with start() as exporter, connect(exporter) as peer:
        await peer.send_hello(engines=2)
        steps = [
            VllmStep(
                number,
                1.0,
                1.0,
                VllmStats(
                    num_running_reqs=3 + number,
                    num_waiting_reqs=2,
                    num_skipped_waiting_reqs=1,
                    kv_cache_usage=0.25 + number / 2,
                ),
            )
            for number in range(2)
        ]
        await peer.send(batch(1, *steps))
        await until(lambda: exporter.intake.items == 2)
        found = await newer(exporter)
        page = parse(await get(exporter.url, **PROMETHEUS))
        after, endpoints = await newer(exporter, found), exporter.endpoints

    rows = {row.engine: row for row in found.engines}
    for name, family in (
        ("running", "vllm:num_requests_running"),
        ("waiting", "vllm:num_requests_waiting"),
        ("kv_cache_usage", "vllm:kv_cache_usage_perc"),
    ):
        assert {n: getattr(row, name) for n, row in rows.items()} == values(page, family)
    states = page["sidestep_engine_state"].samples
    shown = {dict(k)["engine"]: dict(k)["state"] for (_, k), value in states.items() if value}
    assert {name: row.state for name, row in rows.items()} == shown
    assert found.version == __version__
    assert found.total is not None
    assert (found.total.running, found.total.waiting, found.total.kv_cache_usage) == (7, 6, 0.5)
    assert found.total.engine == "2 engines"
    assert found.total.model == "m"
    assert (found.total.dialect, found.verdict.level) == ("vllm", "ok")
    own = found.exporter
    assert own.series == page["sidestep_series"].samples["sidestep_series", ()]
    assert own.streams == page["sidestep_streams"].samples["sidestep_streams", ()] == 1
    assert own.endpoints == endpoints
    assert own.resident_bytes > 1 << 20
    assert own.lost == 0
    assert own.last_scrape is None
    assert after.exporter.last_scrape is not None
    assert 0 <= after.exporter.last_scrape < 10


async def test_ranks_with_the_same_requests_count_once_in_all_outputs(start: Start) -> None:
    """The pod view, the live page's total, and the verdicts of the page and of ``top`` are equal."""
    ranks = {"model_name": "m", "engine_type": "unified", "pp_rank": "0", "moe_ep_rank": "0"}
    infos = [
        EngineInfo(f"h/m/tp{tp}", "sglang", {**ranks, "tp_rank": str(tp)}, role=CORE)
        for tp in range(2)
    ]
    state = SglangSchedulerStats(num_running_reqs=QueueCount(4), num_queue_reqs=QueueCount(2))
    async with start() as exporter, connect(exporter) as peer:
        await peer.greet(Hello(VERSION, "s", 1, 1, 1, infos))
        await peer.send(batch(1, *(SglangStats(tp, 1.0, 1.0, state) for tp in range(2))))
        idle = [Progress(tp, steps=5, unfinished=2) for tp in range(2)]
        await peer.send(Heartbeat(1, 2, 0, progress=idle))
        await until(lambda: all(e.is_up for e in exporter.registry.engines.values()))
        await until(lambda: exporter.intake.items == 2)
        found = await newer(exporter)
        pod = parse(await get(f"{exporter.url}/pod"))
        asked = asyncio.create_task(asyncio.to_thread(sidestep, "top", "--json", base(exporter)))
        # On a busy machine its start takes longer than a silent peer counts as connected.
        while not asked.done():
            await peer.send(Heartbeat(1, 2, 0, progress=idle))
            await asyncio.wait([asked], timeout=0.5)
        top = asked.result()

    (running,) = pod["sglang:num_running_reqs"].samples.values()
    assert found.total is not None
    assert found.total.running == running == 4
    assert [row.summed for row in found.engines] == [True, False]
    assert found.verdict.text == "all 2 engines are well: requests running 4, waiting 2"
    assert json.loads(top.stdout)["verdict"]["text"] == found.verdict.text


async def test_viewers_share_an_answer(start: Start) -> None:
    """The answer is rendered once a second at most, and compressed for clients that accept that."""
    async with start() as exporter:
        await replay(exporter, MAIN_RUN)
        found = await asyncio.gather(*(live(exporter) for _ in range(5)))
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            for path in ("/api/v1/live", "/api/v1/live/history"):
                url = base(exporter) + path
                async with session.get(url, headers={"Accept-Encoding": "gzip"}) as answer:
                    packed = gzip.decompress(await answer.read())
                    assert answer.headers["Content-Encoding"] == "gzip"
                    assert answer.content_type == "application/json"
                async with session.get(url, headers={"Accept-Encoding": "identity"}) as answer:
                    assert await answer.read() == packed
        assert len({each.time for each in found}) == 1
        later = await newer(exporter, found[0])

    assert later.time - found[0].time >= 1.0


async def test_without_the_page_nothing_is_kept(start: Start) -> None:
    """There is no endpoint and no history."""
    async with start(web_disable_ui=True) as exporter:
        await replay(exporter, MAIN_RUN)
        for path in ("/api/v1/live", "/api/v1/live/history"):
            assert (await status(exporter, path))[0] == 404
        code, text = await status(exporter, "/")
        assert code == 200
        assert 'href="/metrics"' in text
        assert "/api/v1/live" not in text
        views = [each for each in gc.get_objects() if isinstance(each, LiveView)]
        assert not any(view.histories for view in views if view._intake is exporter.intake)


async def test_streams_and_their_delivery(start: Start) -> None:
    """Items that were sent twice, dropped, folded or not yet received, until the stream closes."""

    async def stream() -> dict[str, Any]:
        await asyncio.sleep(1.05)
        text = await get(f"{base(exporter)}/api/v1/live/history?engine=s0")
        detail = msgspec.json.decode(text, type=HistoryAnswer).detail
        assert detail is not None
        assert detail.labels == {"engine": "s0", "model_name": "m"}
        (found,) = detail.streams
        made: dict[str, Any] = msgspec.to_builtins(found)
        return made

    step = VllmStep(0, 1.0, 1.0, None, IterationStats(num_generation_tokens=1))
    async with start() as exporter, connect(exporter) as peer:
        await peer.send_hello()
        for _ in range(2):
            await peer.send(batch(1, step, step))
        await peer.send(Heartbeat(1, 5, 100, dropped=3, errors=2, folded=7))
        await until(lambda: exporter.intake.receiver.streams["s"].folded == 7)
        found = await stream()
        assert found.pop("last_seen") < 10
        assert found == {
            "id": "s", "state": "open", "applied": 2, "lag": 3, "lost": 3, "retransmitted": 2,
            "folded": 7, "errors": 2,
        }  # fmt: skip
        assert (await live(exporter)).exporter.lost == 3
        await peer.send(Bye(1, 2))
        await until(lambda: not exporter.registry.engines["s0"].feeds.streams)
        assert (await stream())["state"] == "closed"


async def test_items_that_a_sender_no_longer_had(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """The live answer counts them with those that senders dropped; the log names the stream."""
    async with start() as exporter, connect(exporter) as peer:
        await peer.send_hello()
        await peer.send(Heartbeat(1, 0, 0, dropped=3))
        await peer.send(Bye(1, 4))
        await until(lambda: not exporter.registry.engines["s0"].feeds.streams)
        assert (await live(exporter)).exporter.lost == 7
    assert "stream s: 4 items are lost: its sender no longer had them" in caplog.messages


def test_the_document_has_every_field() -> None:
    """docs/live.md has those of /api/v1/live, on which other programs rely."""
    text = (Path(__file__).parents[3] / "docs" / "live.md").read_text()
    structs = (answers.Live, answers.Verdict, answers.EngineRow, answers.Percentiles, answers.ExporterHealth,
               answers.Warned)  # fmt: skip
    fields = {field.name for struct in structs for field in msgspec.structs.fields(struct)}

    assert {name for name in fields if f"`{name}`" not in text} == set()
