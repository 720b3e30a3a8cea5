"""The answers of the live page's endpoints: a real exporter, fed over sockets, read over HTTP."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import logging
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from exporters import MAIN_RUN, SPEC_RUN, Start, recorded_run, until
from pages import Family, get, parse
from promtool import PROMTOOLS, run
from sidestep import __version__
from sidestep.app import Exporter
from sidestep.engines.sglang.wire import QueueCount, SglangSchedulerStats, SglangStats
from sidestep.engines.vllm.wire import SchedulerStats as VllmStats
from sidestep.engines.vllm.wire import VllmStep
from sidestep.exposition.live import rows
from sidestep.exposition.live.charts import SERIES
from sidestep.exposition.live.rows import HistoryAnswer, Live
from sidestep.exposition.live.view import MAX_WARNINGS, LiveView
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import Bye, EngineInfo, Heartbeat, Hello
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.recording.replay import Replay
from socket_peers import batch, connect

CORE = recorded_run("core_aborts")
SGLANG = recorded_run("sglang")
PERCENTILES = ("p50", "p95", "p99")
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


async def play(exporter: Exporter, path: Path, namespace: str = "test") -> None:
    """Replay a recording."""
    player = Replay(path, exporter.endpoints[0], realtime=False, namespace=namespace)
    await asyncio.to_thread(player.run)


class Twice(Replay):
    """A replay of two rounds, the second of which waits until it is let.

    Attributes:
        delivered: Set once the first round is applied.
        again: Lets the second round begin.
    """

    def __init__(self, path: Path, endpoint: str, namespace: str) -> None:
        super().__init__(path, endpoint, realtime=False, namespace=namespace)
        self.delivered, self.again = threading.Event(), threading.Event()

    def wait_for_round(self) -> None:
        """Wait for the second round; there is no third one."""
        if self.progress.rounds == 1:
            self.again.wait()
        elif self.progress.rounds > 1:
            self._stop.set()

    def _round(self, streams: Mapping[str, Publisher]) -> None:
        super()._round(streams)
        self._wait(lambda: all(publisher.drained for publisher in streams.values()))
        self.delivered.set()


@asynccontextmanager
async def played(
    exporter: Exporter, runs: Sequence[tuple[Path, str]]
) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """Replay recordings, and yield the function that replays them once more by the same processes."""
    players = [Twice(path, exporter.endpoints[0], name) for path, name in runs]
    playing = [asyncio.create_task(asyncio.to_thread(p.run, once=False)) for p in players]
    await until(lambda: all(player.delivered.is_set() for player in players), 60.0)
    engines = exporter.registry.engines.values()
    await until(lambda: not any(math.isnan(engine.caught_up_at) for engine in engines))

    async def again() -> None:
        for player in players:
            player.again.set()
        await asyncio.gather(*playing)

    yield again


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


SECONDS = 50.0
COUNTED: dict[str, dict[str, tuple[str, dict[str, str], float]]] = {
    "vllm": {
        "finished": ("vllm:request_success_total", {}, 1.0),
        "aborted": ("vllm:request_success_total", {"finished_reason": "abort"}, 1.0),
        "preemptions": ("vllm:num_preemptions_total", {}, 1.0),
        "prompt_tokens_per_second": (
            "vllm:prompt_tokens_by_source_total", {"source": "local_compute"}, SECONDS,
        ),
        "generation_tokens_per_second": ("vllm:generation_tokens_total", {}, SECONDS),
    },
    "tokenizer": {
        "finished": ("sglang:num_requests_total", {}, 1.0),
        "aborted": ("sglang:num_aborted_requests_total", {}, 1.0),
    },
    "scheduler": {
        "preemptions": ("sglang:num_retracted_requests_total", {}, 1.0),
        "prompt_tokens_per_second": (
            "sglang:realtime_tokens_total", {"mode": "prefill_compute"}, SECONDS,
        ),
        "generation_tokens_per_second": (
            "sglang:realtime_tokens_total", {"mode": "decode"}, SECONDS,
        ),
    },
}  # fmt: skip
"""Numbers of a row: the family, labels of its samples, and a divisor."""
LATENCIES = {
    "ttft": "time_to_first_token_seconds",
    "inter_token": "inter_token_latency_seconds",
    "e2e": "e2e_request_latency_seconds",
}


def difference(pages: list[dict[str, Family]], name: str, wanted: dict[str, str]) -> float:
    """Return by how much the samples with these labels have grown between two pages."""
    totals = [
        sum(
            value
            for family in page.values()
            for (sample, key), value in family.samples.items()
            if sample == name and wanted.items() <= {"origin": "", **dict(key)}.items()
        )
        for page in pages
    ]
    return totals[1] - totals[0]


async def test_the_last_minute_equals_promql(start: Start, tmp_path: Path) -> None:
    """Counts and rates equal differences of two pages; percentiles equal PromQL's on them, to 1e-9.

    Recorded runs of vLLM and of SGLang are played twice, and the view samples the engines between.
    """
    runs = ((CORE, "a"), (MAIN_RUN, "b"), (SGLANG, "c"))
    async with start() as exporter:
        now = [100.0]
        view = LiveView(exporter.intake, clock=lambda: now[0])
        async with played(exporter, runs) as again:
            await view.sample()
            texts = [await get(exporter.url)]
            await again()
        now[0] += SECONDS
        texts.append(await get(exporter.url))
        found = msgspec.json.decode(b"".join((await view.answer()).parts), type=Live)
        labels = {engine.id: engine.labels for engine in exporter.registry.engines.values()}

    pages = [*map(parse, texts)]
    checks: list[tuple[str, str, float | None]] = []
    for row in found.engines:
        own = {"origin": "", **labels[row.id]}
        kind = row.dialect
        if kind == "sglang":
            kind = "scheduler" if "tp_rank" in own else "tokenizer"
        for name, (family, more, divisor) in COUNTED[kind].items():
            grown = difference(pages, family, {**own, **more})
            assert getattr(row, name) == pytest.approx(grown / divisor), (row.id, name)
        if kind == "scheduler":
            assert (row.finished, row.ttft, row.inter_token, row.e2e) == (None,) * 4
            continue
        matchers = ",".join(f'{name}="{value}"' for name, value in own.items())
        for name, end in LATENCIES.items():
            percentiles = getattr(row, name)
            family = f"{row.dialect}:{end}"
            assert percentiles.count == difference(pages, f"{family}_count", own) > 0
            selector = f"{family}_bucket{{{matchers}}}"
            checks += [(each, selector, getattr(percentiles, each)) for each in PERCENTILES]
    kinds = [row.dialect for row in found.engines]
    assert sorted(kinds) == ["sglang", "sglang", "vllm", "vllm"]
    assert len(checks) == 3 * 3 * 3
    assert {row.prefix_hit_rate is None for row in found.engines if row.dialect == "vllm"} == {
        False
    }
    assert_promql(tmp_path, texts, checks)


def assert_promql(
    directory: Path, pages: list[str], checks: list[tuple[str, str, float | None]]
) -> None:
    """Assert that ``histogram_quantile`` over the increase between two pages is as wanted, to 1e-9."""
    series: dict[str, list[float]] = {}
    for page in pages:
        for line in page.splitlines():
            if "_bucket{" in line:
                name, value = line.rsplit(" ", 1)
                # PromQL extrapolates up to where a counter was 0: all buckets were far from it.
                series.setdefault(name, []).append(float(value) + 1e9)
    inputs = [
        {"series": name, "values": " ".join(f"{value:.0f}" for value in both)}
        for name, both in series.items()
        if len(both) == 2
    ]
    looks = [
        {
            "expr": f"abs(histogram_quantile(0.{name[1:]}, sum by (le)"
            f" (increase({selector}[90s]))) - {wanted!r}) < bool 1e-9",
            "eval_time": "1m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for name, selector, wanted in checks
    ]
    test = {"interval": "1m", "input_series": inputs, "promql_expr_test": looks}
    file = directory / "test.json"
    file.write_text(json.dumps({"tests": [test]}))
    binaries = [binary for binary in PROMTOOLS.values() if binary is not None]
    if not binaries:
        pytest.skip("promtool is not installed")
    for binary in binaries:
        done = run("test", "rules", file, binary=binary)
        assert done.returncode == 0, done.stdout + done.stderr


async def test_all_engines_as_one(start: Start, tmp_path: Path) -> None:
    """Percentiles of merged buckets equal PromQL's over the sum, not a mean of percentiles."""
    async with start() as exporter:
        now = [100.0]
        view = LiveView(exporter.intake, clock=lambda: now[0])
        runs = ((MAIN_RUN, "a"), (SPEC_RUN, "b"))
        async with played(exporter, runs) as again:
            await view.sample()
            pages = [await get(exporter.url)]
            await again()
        now[0] += 50.0
        await view.sample()
        pages.append(await get(exporter.url))
        found = msgspec.json.decode(b"".join((await view.answer()).parts), type=Live)
        body = await view.history()

    assert body is not None
    history = msgspec.json.decode(b"".join(body.parts), type=HistoryAnswer)
    total = found.total
    assert total is not None
    assert total.ttft is not None
    assert total.inter_token is not None
    parts = [row.inter_token for row in found.engines if row.inter_token is not None]
    assert total.inter_token.count == sum(part.count for part in parts)
    assert len({part.p95 for part in parts}) == 2
    selector = "vllm:inter_token_latency_seconds_bucket"
    first = "vllm:time_to_first_token_seconds_bucket"
    checks = [
        (name, family, getattr(percentiles, name))
        for family, percentiles in ((selector, total.inter_token), (first, total.ttft))
        for name in PERCENTILES
    ]
    assert_promql(tmp_path, pages, checks)
    assert history.series["finished"] == [total.finished]
    assert history.series["inter_token_p95"] == [total.inter_token.p95]
    heat = {each.name: each for each in history.heatmaps}
    assert sum(heat["inter_token"].counts[0]) == total.inter_token.count
    assert history.detail is None


async def test_repeated_ranks_count_once(start: Start) -> None:
    """A tensor-parallel rank reports what rank 0 reports; a scheduler and a tokenizer are two engines."""
    labels = {"engine_type": "unified", "model_name": "m", "moe_ep_rank": "0", "pp_rank": "0"}
    infos = [
        EngineInfo(f"r{rank}", "sglang", {**labels, "tp_rank": str(rank)}) for rank in range(2)
    ]
    infos.append(EngineInfo("t", "sglang", {"engine_type": "unified", "model_name": "m"}))
    infos.append(
        EngineInfo("s", "stream", {"engine": "0", "model_name": "m"}, features=["forward_pass"])
    )
    async with start() as exporter, connect(exporter) as peer:
        await peer.send(Hello(VERSION, "s", 1, 1, 1, infos))
        await peer.receive()
        stats = SglangSchedulerStats(num_running_reqs=QueueCount(4), token_usage=0.5)
        await peer.send(batch(1, *(SglangStats(rank, 1.0, 1.0, stats) for rank in range(2))))
        await until(lambda: exporter.intake.items == 2)
        found = await newer(exporter)

    assert [row.running for row in found.engines] == [4, 4, None, None]
    assert found.total is not None
    assert found.total.running == 4
    assert found.total.dialect == "sglang"


async def test_viewers_share_an_answer(start: Start) -> None:
    """It is rendered once a second at most, and compressed for who accepts that."""
    async with start() as exporter:
        await play(exporter, MAIN_RUN)
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


async def test_an_unknown_engine_is_one_line(start: Start) -> None:
    """It says where the known ones are."""
    async with start() as exporter:
        await play(exporter, MAIN_RUN)
        found = await status(exporter, "/api/v1/live/history?engine=nobody")
        (known,) = (await live(exporter)).engines
        ok, _ = await status(exporter, f"/api/v1/live/history?engine={known.id}")

    assert found == (404, "no such engine; /api/v1/engines lists all\n")
    assert ok == 200


async def test_without_the_page_nothing_is_kept(start: Start) -> None:
    """There is no endpoint, no history and no handler of warnings."""
    handlers = [*logging.getLogger("sidestep").handlers]
    async with start(web_disable_ui=True) as exporter:
        await play(exporter, MAIN_RUN)
        for path in ("/api/v1/live", "/api/v1/live/history"):
            assert (await status(exporter, path))[0] == 404
        code, text = await status(exporter, "/")
        assert code == 200
        assert 'href="/metrics"' in text
        assert "/api/v1/live" not in text
        views = [each for each in gc.get_objects() if isinstance(each, LiveView)]
        assert not any(view.histories for view in views if view._intake is exporter.intake)
        assert logging.getLogger("sidestep").handlers == handlers


async def test_the_endpoints_need_the_password(start: Start, tmp_path: Path) -> None:
    """Like all other pages."""
    config = tmp_path / "web.yml"
    # The hash of "secret".
    config.write_text(
        "basic_auth_users:\n  me: $2b$04$1OnNzzFYG9sYKyMl0s3C6.wLCSUtN1Q/Xk9yH3wAcNaHqf1QxTG3K\n"
    )
    async with start(web_config_file=str(config)) as exporter:
        for path in ("/api/v1/live", "/api/v1/live/history"):
            assert (await status(exporter, path))[0] == 401


async def test_refused_senders_are_among_the_warnings(start: Start) -> None:
    """The newest first, with why; the answer has the last 20."""
    async with start() as exporter, connect(exporter) as peer:
        await peer.send(Hello(VERSION + 1, "new", 1, 1, 1, []))
        await peer.receive()
        info = EngineInfo("e", "no-such-dialect", {"engine": "0", "model_name": "m"})
        await peer.send(Hello(VERSION, "bad", 2, 1, 1, [info]))
        await peer.receive()
        found = (await newer(exporter)).warnings
        for number in range(MAX_WARNINGS + 5):
            logging.getLogger("sidestep.test").warning("number %d", number)
        logging.getLogger("sidestep.test").info("not this")
        more = (await newer(exporter)).warnings

    assert [each.text.partition(";")[0] for each in found] == [
        "refused stream bad: unknown_dialect: no-such-dialect",
        f"refused stream new: version: sender uses version {VERSION + 1}, this exporter {VERSION}",
    ]
    assert found[0].time >= found[1].time
    assert [each.text for each in more] == [
        f"number {number}" for number in reversed(range(5, MAX_WARNINGS + 5))
    ]


async def test_streams_and_their_delivery(start: Start) -> None:
    """What was sent twice, dropped, folded or not yet received, until the stream closes."""

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
        await until(lambda: not exporter.registry.engines["s0"].streams)
        assert (await stream())["state"] == "closed"


async def test_an_engine_that_has_just_come_has_no_rates(start: Start) -> None:
    """A number that is not known is none, not 0; a second later it is known."""
    async with start() as exporter, connect(exporter) as peer:
        await peer.send_hello()
        view = LiveView(exporter.intake)
        found = msgspec.json.decode(b"".join((await view.answer()).parts), type=Live)
        (row,) = found.engines
        assert (row.finished, row.generation_tokens_per_second, row.ttft) == (None, None, None)

        async def is_known() -> bool:
            (row,) = (await live(exporter)).engines
            return row.finished == 0 and row.generation_tokens_per_second == 0

        await until(is_known, 10.0)


def test_the_document_has_every_field() -> None:
    """docs/live.md is the schema that other programs rely on."""
    text = (Path(__file__).parents[3] / "docs" / "live.md").read_text()
    structs = (rows.Live, rows.Verdict, rows.EngineRow, rows.Percentiles, rows.ExporterHealth,
               rows.Warned, rows.HistoryAnswer, rows.HeatMap, rows.EngineDetail, rows.StreamRow)  # fmt: skip
    fields = {field.name for struct in structs for field in msgspec.structs.fields(struct)}

    assert {name for name in fields | {*SERIES[:10]} if f"`{name}`" not in text} == set()
