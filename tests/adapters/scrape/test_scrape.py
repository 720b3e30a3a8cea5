"""An exporter that scrapes real servers, and its own metrics about them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from exporters import MAIN_RUN, SPEC_RUN, Start, page_of_engine, until
from pages import get
from polled import Polled, Says, head, page, polled, raw, stall
from replays import replay
from scraped import openmetrics_samples, samples
from sidestep.app.exporter import Exporter
from sidestep.errors import ConfigError
from sidestep_adapters.polling import http_client
from sidestep_adapters.polling import state as poll_state
from sidestep_adapters.scrape import poller

VLLM = Path(__file__).parents[3] / "docs" / "vllm.md"
TRITON = page_of_engine("page_triton")
FAST = "interval=0.05"


def number(exporter: Exporter, outcome: str, server: Polled) -> float:
    """Return the polls of ``server`` with this outcome."""
    return exporter.metrics.value("sidestep_scrape_polls_total", server.url, outcome)


def state(text: str) -> str:
    """Return the state of the only target, on the exporter's page."""
    (found,) = [
        dict(labels)["state"]
        for (name, labels, _), value in samples(text).items()
        if name == "sidestep_scrape_state" and value == "1.0"
    ]
    return found


async def scraped(exporter: Exporter, server: Polled) -> str:
    """Return the exporter's page, once the server's is on it."""
    await until(lambda: number(exporter, "ok", server) > 0)
    return await get(exporter.url)


async def shows(exporter: Exporter, condition: Callable[[str], bool]) -> str:
    """Return the exporter's page, once the condition holds."""
    async with asyncio.timeout(20):
        while not condition(text := await get(exporter.url)):
            await asyncio.sleep(0.02)
    return text


def triton(text: str) -> str:
    """Return Triton's page."""
    found = [
        line for line in text.splitlines() if line.startswith(("nv_", "# HELP nv", "# TYPE nv"))
    ]
    return "\n".join(found) + "\n"


async def test_a_scraped_page_is_on_the_exporters(start: Start) -> None:
    """All its samples follow the exporter's, in both formats, as JSON, and by name."""
    async with polled(page(TRITON)) as server, start(scrape=(server.url,)) as exporter:
        text = await scraped(exporter, server)
        openmetrics = await get(exporter.url, Accept="application/openmetrics-text")
        one = await get(f"{exporter.url}?name[]=nv_cpu_utilization&name[]=sidestep_scrape_samples")
        values = await get(
            exporter.url.replace("/metrics", "/api/v1/metrics?name[]=nv_cpu_utilization")
        )

    assert samples(triton(text)) == samples(TRITON)
    assert samples(triton(openmetrics)) == samples(TRITON)
    assert openmetrics_samples(openmetrics.removesuffix("# EOF\n")).keys() > samples(TRITON).keys()
    assert sorted(name for name, _, _ in samples(one)) == [
        "nv_cpu_utilization",
        "sidestep_scrape_samples",
    ]
    (family,) = json.loads(values)
    assert (family["type"], len(family["samples"])) == ("gauge", 1)
    found = {name: value for (name, _, _), value in samples(text).items()}
    assert float(found["sidestep_scrape_samples"]) == len(samples(TRITON))
    assert float(found["sidestep_scrape_poll_duration_seconds"]) > 0
    assert "sidestep_scrape_left_out_samples" not in found
    assert state(text) == "up"


async def test_an_engines_families_come_from_the_engine(start: Start) -> None:
    """While it pushes; before and after, from the page."""
    native = page_of_engine("page_spec")

    def families(text: str) -> list[bool]:
        """Return True for each family of the scraped page."""
        return ['pod="a"' in line for line in text.splitlines() if line.startswith(names)]

    names = (
        "vllm:generation_tokens_total",
        "vllm:e2e_request_latency_seconds_count",
        "python_info",
    )
    async with (
        polled(page(native)) as server,
        start(scrape=(f"{server.url},label.pod=a",)) as exporter,
    ):
        before = await scraped(exporter, server)
        await replay(exporter, SPEC_RUN)
        after = await shows(exporter, lambda text: families(text) == [False, False, False])
        exporter.registry.clear()
        await shows(exporter, lambda text: families(text) == [True, True, False])

    assert families(before) == [True, True, False]
    assert "http_requests_total" in after


async def test_http_families_of_vllm_by_the_documented_flag(start: Start) -> None:
    """Beside a connected engine, vLLM's page adds exactly those; what is left out is counted."""
    (options,) = re.findall(r"--scrape http://127.0.0.1:8000/metrics(\S*)", VLLM.read_text())
    native = page_of_engine("page_main")
    async with (
        polled(page(native)) as server,
        start(scrape=(f"{server.url}{options},label.pod=a",)) as exporter,
    ):
        await replay(exporter, MAIN_RUN)
        found = samples(await scraped(exporter, server))
    added = {
        (name, labels - {("pod", "a")}): value
        for (name, labels, _), value in found.items()
        if ("pod", "a") in labels
    }
    of_vllm = {(name, labels): value for (name, labels, _), value in samples(native).items()}
    left_out = {
        dict(labels)["reason"]: float(value)
        for (name, labels, _), value in found.items()
        if name == "sidestep_scrape_left_out_samples"
    }

    assert added == {key: value for key, value in of_vllm.items() if key[0].startswith("http_")}
    assert {"http_requests", "http_request_duration_seconds_bucket"} <= {name for name, _ in added}
    assert left_out == {"ours": len(of_vllm) - len(added)}


WRONG = [
    (page("<html>Log in</html>"), "bad_answer"),
    (raw(b"HTTP/1.1 200 OK\r\n\r\n", b"a 1\nb 2"), "truncated"),
    (page(""), "bad_answer"),
    (page("", "503 Service Unavailable"), "http_503"),
    (raw(head(100), b"a 1\n"), "truncated"),
    (page("# TYPE a counter\na_total 1\n", kind="application/openmetrics-text"), "truncated"),
    (raw(head(None), *[b"a 1 \n" * 10_000] * 100), "bad_answer"),
]


@pytest.mark.parametrize(("says", "outcome"), WRONG)
async def test_an_invalid_page_hides_the_last_one(
    says: Says,
    outcome: str,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A target with an invalid page is hidden at once, and the log has one line a minute."""
    monkeypatch.setattr(http_client, "MAX_BODY_BYTES", 1 << 20)
    caplog.set_level("INFO")
    async with polled(page(TRITON)) as server, start(scrape=(f"{server.url},{FAST}",)) as exporter:
        assert "nv_" in await scraped(exporter, server)
        server.says = says
        text = await shows(exporter, lambda text: "nv_" not in text)
        await until(lambda: number(exporter, outcome, server) > 2)
        assert state(text) == "down"
        server.says = page(TRITON)
        await shows(exporter, lambda text: "nv_" in text and state(text) == "up")

    lines = [r.getMessage() for r in caplog.records if r.name == poller.__name__]
    assert [line.startswith(f"{server.url}: {outcome}: ") for line in lines] == [False, True]


LAST = b"# TYPE a_total counter\na_total 5\n# TYPE last gauge\nlast 7"
CHUNKED = head(None, more="Transfer-Encoding: chunked\r\n")


@pytest.mark.parametrize(
    "says",
    [
        page(LAST),
        raw(CHUNKED, b"%x\r\n" % len(LAST), LAST, b"\r\n0\r\n\r\n"),
    ],
)
async def test_a_whole_page_may_lack_its_last_line_end(says: Says, start: Start) -> None:
    """HTTP says that it is whole, as Prometheus believes."""
    async with polled(says) as server, start(scrape=(f"{server.url},{FAST}",)) as exporter:
        await shows(exporter, lambda text: "\nlast 7" in text)


async def test_a_target_that_answered_with_json_is_asked_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After twice the time each, since each request may take the answer away from others."""
    monkeypatch.setattr(poller, "JSON_PAUSE", (0.1, 0.4))
    json_page = page(' \n[{"iter": 1}]')
    async with polled(json_page) as server, start(scrape=(f"{server.url},{FAST}",)) as exporter:
        began = time.monotonic()
        await until(lambda: number(exporter, "json", server) == 5)
        assert time.monotonic() - began > 0.1 + 0.2 + 0.4
        server.says = page(TRITON)
        await shows(exporter, lambda text: "nv_" in text and state(text) == "up")

    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert "/prometheus/metrics" in line


async def test_a_query_is_sent_and_stands_in_no_label_and_no_log_line(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A query may be a token; targets that differ in nothing else are numbered."""
    caplog.set_level("INFO")
    async with polled(page("a 1\n")) as server:
        urls = [f"{server.url}?token=s3cret", f"{server.url}?token=s3cret&part=2"]
        async with start(scrape=[f"{url},{FAST}" for url in urls]) as exporter:
            names = [f"{server.url}?***", f"{server.url}?*** #2"]

            def all_have(outcome: str) -> bool:
                polls = "sidestep_scrape_polls_total"
                return all(exporter.metrics.value(polls, name, outcome) > 0 for name in names)

            await until(lambda: all_have("ok"))
            server.says = raw(b"no http\r\n\r\n")
            await until(lambda: all_have("bad_answer"))
            text = await get(exporter.url)

    assert {head.split()[1] for head in server.heads} == {
        "/metrics?token=s3cret",
        "/metrics?token=s3cret&part=2",
    }
    assert "s3cret" not in text
    targets = {dict(labels).get("target") for _, labels, _ in samples(text)}
    assert targets == {None, *names}
    lines = [r.getMessage() for r in caplog.records if r.name == poller.__name__]
    for name in names:
        assert [line.startswith(f"{name}: ") for line in lines].count(True) == 2
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("timeout", [60.0, 0.1])
async def test_a_slow_target_is_stale_before_it_is_hidden(
    start: Start, monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    """This holds for missing responses and for repeated timeouts."""
    monkeypatch.setattr(poll_state, "GRACE", 1.0)
    options = f"{FAST},timeout={timeout}"
    async with (
        polled(page(TRITON)) as server,
        start(scrape=(f"{server.url},{options}",)) as exporter,
    ):
        await scraped(exporter, server)
        server.says = stall()
        since = time.monotonic()
        text = await shows(exporter, lambda text: state(text) != "up")
        assert state(text) == "stale"
        assert "nv_" in text
        text = await shows(exporter, lambda text: state(text) != "stale")
        assert 0.8 < time.monotonic() - since < 10
        assert state(text) == "down"
        assert "nv_" not in text
        assert (number(exporter, "slow", server) > 0) == (timeout < 1)


async def test_memory_is_released_when_short(start: Start) -> None:
    """The page returns with the next response."""
    async with polled(page(TRITON)) as server, start(scrape=(server.url,)) as exporter:
        await scraped(exporter, server)
        server.says = stall()
        exporter.ingest._sources.cut()
        await shows(exporter, lambda text: "nv_" not in text)
        server.says = page(TRITON)
        exporter.ingest._sources.cut()
        await shows(exporter, lambda text: "nv_" in text)


async def test_a_missing_file_is_one_error_line(start: Start) -> None:
    """The exporter refuses to start, with one line, if a file of a target is missing."""
    with pytest.raises(
        ConfigError, match=r"^--scrape https://h/metrics: cannot read /none: No such"
    ):
        async with start(scrape=("https://h,header.a=@/none",)):
            pass


async def test_a_redirect_is_not_followed(start: Start) -> None:
    """A redirect is not a page, and the secret is not sent there."""
    async with polled(page(TRITON)) as elsewhere:
        moved = raw(head(0, "302 Found", more=f"Location: {elsewhere.url}\r\n"))
        async with polled(moved) as server, start(scrape=(f"{server.url},header.a=b",)) as exporter:
            await until(lambda: number(exporter, "http_302", server) > 0)

    assert elsewhere.heads == []
