"""Targets of ``sidestep top``: real pages of engines over real HTTP, exporters, and all that can fail."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from command_line import one_line, sidestep
from exporters import Start, page_of_engine, until
from ports import free_port
from reporting_processes import process
from sidestep.catalog.page_reader import Reading, read_page, samples
from sidestep.errors import ConfigError
from sidestep.exposition.live.answers import EngineRow
from sidestep.exposition.live.increases import Increases
from sidestep.protocol.progress import Progress
from sidestep_tools.top.report import TargetReport
from sidestep_tools.top.targets import Target, Targets
from sidestep_tools.web_client import fetch
from sidestep_tools.web_client.access import Access
from trtllm_page import made_page
from web_servers import server

TEXT = "text/plain; version=0.0.4"


def grown(text: str, factor: int) -> str:
    """Return the page after it has counted ``factor`` times as much."""

    def times(match: re.Match[str]) -> str:
        return f"{match[1]} {float(match[2]) * factor!r}"

    counted = r"(?m)^(\S+?_(?:total|count|sum|bucket|success|failure)(?:\{.*\})?) (\S+)$"
    return re.sub(counted, times, text)


async def twice(first: str, second: str, path: str = "/metrics") -> list[EngineRow]:
    """Return the rows after a page was read with two contents."""
    texts = [first, second]

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=texts[0] if len(texts) == 1 else texts.pop(0))

    async with server(answer, path) as url, Targets([url + path]).connected() as polled:
        await polled.poll()
        await asyncio.sleep(0.05)
        (report,) = (await polled.poll()).targets
    assert report.error is None
    return report.engines


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_real_page(dialect: str) -> None:
    """Each engine is a row, with all numbers that it has."""
    text = page_of_engine("page_dp" if dialect == "vllm" else "page_sglang")
    rows = await twice(text, grown(text, 2))

    assert len({row.id for row in rows}) == len(rows) == (2 if dialect == "vllm" else 1)
    for row in rows:
        assert (row.dialect, row.model) == (dialect, "tiny")
        known = row.running, row.waiting, row.kv_cache_usage, row.ttft, row.inter_token, row.e2e
        assert None not in known
        assert row.generation_tokens_per_second
        assert row.prompt_tokens_per_second
        assert row.finished
        assert 0 <= (row.prefix_hit_rate or 0) < 1


async def test_a_page_of_tensorrt_llm() -> None:
    """Gauges of several processes are one engine's; a mean per request is no time between tokens."""
    rows = await twice(made_page(1), made_page(2), "/prometheus/metrics")

    assert {row.dialect for row in rows} == {"trtllm"}
    assert all(row.inter_token is None for row in rows)
    assert any(row.ttft is not None for row in rows)


async def test_triton() -> None:
    """Each model is a row; what its page does not have is not known."""
    text = page_of_engine("page_triton")
    rows = {row.model: row for row in await twice(text, grown(text, 2))}

    assert rows["cached"].finished == 11
    assert rows["cached"].running is None
    assert rows["cached"].ttft is None


LLAMA = """# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total {0}
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total {0}
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
llamacpp:requests_deferred 1
"""


async def test_llama_cpp() -> None:
    """Its page has no labels: the row is named after its address."""
    (row,) = await twice(LLAMA.format(100), LLAMA.format(300))

    assert (row.dialect, row.model, row.running, row.waiting) == ("llamacpp", "", 2, 1)
    assert row.generation_tokens_per_second
    assert (row.ttft, row.kv_cache_usage, row.prefix_hit_rate) == (None, None, None)
    assert row.engine.startswith("127.0.0.1:")


OLD = """vllm:num_requests_running{model_name="m"} 4
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:generation_tokens_total{model_name="m"} 10
"""


def test_older_names() -> None:
    """A release before a family was renamed is read, too."""
    (reading,) = read_page(OLD)

    assert reading.gauges == {"running": 4.0, "kv_cache_usage": 0.5}


def test_labels_are_read_as_written() -> None:
    """With braces, commas and escaped characters in their values."""
    text = 'vllm:num_requests_running{engine="a},{b",model_name="x\\\\y\\"\\nz"} 1\n'
    (reading,) = read_page(text)

    assert reading.key == ('x\\y"\nz', "a},{b", "")


@pytest.mark.parametrize(
    "line",
    ['x 5 # {trace_id="a"} 0.5 1.2', 'x{l="a # {b"} 5', 'x{l="a # {}"} 5 # {t="}",u="\\""} 1'],
)
def test_an_exemplar_is_no_value(line: str) -> None:
    """It follows the value on a page in the OpenMetrics format."""
    (sample,) = samples(line)["x"]

    assert sample.value == 5.0
    assert "trace_id" not in sample.labels


def reading(count: float, buckets: tuple[float, ...] = (0.0, 0.0)) -> Reading:
    """Return a reading of one counter and one histogram."""
    return Reading("vllm", ("m",), {}, {"generation": count}, {"ttft": ((1.0,), buckets)})


def test_a_counter_reset_is_no_loss() -> None:
    """As in PromQL: what was counted since the reset is added."""
    found = Increases()
    for at, (count, observed) in enumerate([(100, 10), (110, 12), (5, 3), (15, 4)]):
        found.add(reading(count, (observed, observed)), float(at))
    row = found.row("id", "e", "m")

    assert row.generation_tokens_per_second == pytest.approx((10 + 5 + 10) / 3)
    assert row.ttft is not None
    assert row.ttft.count == 2 + 3 + 1
    assert row.ttft.p95 == pytest.approx(0.95)


async def failing(url: str) -> TargetReport:
    """Return the report of a target that fails."""
    async with Targets([url]).connected() as polled:
        (found,) = (await polled.poll()).targets
    assert found.error is not None
    assert "\n" not in found.error
    assert found.engines == []
    return found


@pytest.mark.parametrize(
    ("status", "body", "content_type", "says"),
    [
        (200, "<html>", "text/html", "answers with HTML"),
        (200, "\x00\xff garbage", TEXT, "not a metrics page"),
        (200, "# TYPE up gauge\nup 1\n", TEXT, "without numbers of a known engine"),
        (200, "vllm:num_requests_running many\n", TEXT, "has no number"),
        (200, 'vllm:time_to_first_token_seconds_bucket{le="x"} 1\n', TEXT, "label le"),
        (401, "", TEXT, "HTTP 401: it needs a password"),
        (503, "", TEXT, "HTTP 503"),
        (404, "", TEXT, "start the engine with metrics"),
    ],
)
async def test_a_wrong_answer(status: int, body: str, content_type: str, says: str) -> None:
    """One line says what is wrong."""

    async def answer(_: web.Request) -> web.Response:
        kind = content_type.partition(";")[0]
        return web.Response(status=status, text=body, content_type=kind)

    async with server(answer) as url:
        assert says in str((await failing(url)).error)


async def test_no_server() -> None:
    """A refused connection is said as the system says it."""
    assert (await failing(f"127.0.0.1:{free_port()}")).error == "cannot connect: Connection refused"


async def test_a_page_that_stalls_keeps_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last rows stay, with their age; other targets are not delayed."""
    monkeypatch.setattr(fetch, "TIMEOUT", 0.5)
    stalls = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        if stalls.is_set():
            await asyncio.sleep(5)
        return web.Response(text=OLD)

    async with server(answer) as url, Targets([url]).connected() as polled:
        (before,) = (await polled.poll()).targets
        stalls.set()
        report = await polled.poll()
    (after,) = report.targets
    assert before.error is None
    assert after.error == "no answer within 0.5 s"
    assert [row.running for row in after.engines] == [4.0]
    assert (after.age or 0) >= 0.5
    assert report.verdict.level == "critical"
    assert report.verdict.text == f"{url} does not answer: no answer within 0.5 s"


async def test_tensorrt_llms_statistics_are_not_read() -> None:
    """Reading its /metrics would take them from others; it has no HEAD there."""
    reads = []

    async def statistics(_: web.Request) -> web.Response:
        reads.append(1)
        return web.json_response([])

    app = web.Application()
    app.router.add_route("GET", "/metrics", statistics)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    found = await failing(f"http://127.0.0.1:{port}")
    await runner.cleanup()

    assert "answers no HEAD" in str(found.error)
    assert not reads


@pytest.mark.parametrize("settings", [{}, {"web_disable_ui": "true"}])
async def test_an_exporter(settings: dict[str, str], start: Start) -> None:
    """With the live page its rows are used; without it, its metrics page, which has states as well."""
    async with start(**settings) as exporter, process(exporter, "ns/m/0"):
        url = exporter.url.removesuffix("/metrics")
        async with Targets([url]).connected() as polled:

            async def has_state() -> bool:
                (found,) = (await polled.poll()).targets
                return [(row.engine, row.state) for row in found.engines] == [("ns/m/0", "ok")]

            await until(has_state, 10.0, "the engine with its state")


@pytest.mark.parametrize(
    "settings",
    [
        {"web_default_view": "pod"},
        {"metrics_drop_label": ("engine",)},
        {"metrics_drop_label": ("model_name",)},
    ],
)
async def test_a_page_whose_engines_are_merged(settings: dict[str, Any], start: Start) -> None:
    """A hang is in the verdict although the page has no series of the engine alone."""
    async with (
        start(web_disable_ui="true", **settings) as exporter,
        process(exporter, "ns/m/0", "one", 1),
        process(exporter, "ns/m/1", "other", 2) as hung,
    ):
        hung.progress = [Progress(0, steps=5, unfinished=2, step_age=200.0)]
        url = exporter.url.removesuffix("/metrics")
        async with Targets([url]).connected() as polled:

            async def is_critical() -> bool:
                found = await polled.poll()
                return found.verdict.level == "critical" and " is stalled: " in found.verdict.text

            await until(is_critical, 10.0, "the hang in the verdict")


async def test_tls(tmp_path: Path) -> None:
    """A certificate of an authority that is not trusted is said; a trusted one works."""
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=OLD)

    async with server(answer, ssl_context=context) as url:
        assert "certificate is not trusted" in str((await failing(url)).error)
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        trusting = Access(cacert=str(tmp_path / "ca.pem"))
        async with Targets([url], trusting).connected() as polled:
            (found,) = (await polled.poll()).targets
    assert found.error is None


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://u:p@host", "http://h:99999"])
def test_an_address_that_is_none(url: str) -> None:
    """One line says so, without the password in it."""
    with pytest.raises(ConfigError) as caught:
        Target(url)
    assert "u:p" not in str(caught.value)


async def command(*arguments: str) -> tuple[int, str]:
    """Run the command beside the servers of the test and return its exit code and output."""
    done = await asyncio.to_thread(sidestep, "top", *arguments)
    return done.returncode, done.stdout


async def test_the_command() -> None:
    """A table and JSON for scripts; the exit code says whether all targets answered."""
    text = page_of_engine("page_main")
    polls = []

    async def answer(_: web.Request) -> web.Response:
        polls.append(1)
        return web.Response(text=grown(text, 1 + len(polls)))

    async with server(answer) as url:
        code, output = await command(url, "--json", "--interval", "0.5")
        report = json.loads(output)
        assert (code, report.keys()) == (0, {"time", "verdict", "targets"})
        (target,) = report["targets"]
        (engine,) = target["engines"]
        assert (target["url"], target["error"]) == (url, None)
        assert engine.keys() == set(EngineRow.__struct_fields__)
        assert engine["generation_tokens_per_second"] > 0

        nobody = f"127.0.0.1:{free_port()}"
        code, output = await command(url, nobody, "--once", "--interval", "0.5")
        lines = output.splitlines()
        assert code == 1
        assert lines[0].startswith(
            f"critical: 1 of 2 targets failed: http://{nobody} does not answer: cannot connect"
        )
        assert lines[2].split()[:3] == ["ENGINE", "MODEL", "STATE"]
        assert lines[3].split()[:2] == ["0", "tiny"]
        assert lines[-1] == f"http://{nobody}: cannot connect: Connection refused"


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["http://x"], 1, "--once and --json"),
        (["ftp://host"], 2, "must be a URL"),
        (["--header", "nonsense", "http://x"], 2, "Name: value"),
        (["--cacert", "/nowhere", "http://x"], 2, "/nowhere: No such file"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], code: int, what: str) -> None:
    """A view needs a terminal."""
    one_line(sidestep("top", *arguments), code, what)
