"""The live page in a real browser, served by a real exporter that real publishers feed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import bcrypt
import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Locator, Page, Route, async_playwright, expect
from playwright.async_api import Error as PlaywrightError

from exporters import Start, recorded_run, until
from lookup_senders import serve
from pages import get, parse
from ports import free_port
from replays import replay
from reporting_processes import process
from sidestep.app.exporter import Exporter
from sidestep.engines.vllm.wire import SchedulerStats as VllmStats
from sidestep.engines.vllm.wire import VllmStep
from sidestep.http.static_files import FOLDER
from sidestep.metrics.ended_counter import part_counter
from sidestep.protocol.messages import Bye, EngineInfo, Hello
from sidestep.protocol.progress import Progress
from sidestep.tracking.health.states import EngineState
from sidestep_adapters.publisher.publisher import Publisher
from socket_peers import batch, connect

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt: chromium)"),
    pytest.mark.asyncio(loop_scope="module"),
]
AXE = {"runOnly": ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"]}
LONG_NAME = "inference-prod/vllm-llama-3-70b-instruct-7f9c5d8b6c-x2x4q/0"
DEFAULT_COLUMNS = [
    "Engine",
    "Model",
    "State",
    "Run",
    "Wait",
    "Load",
    "KV",
    "Hits",
    "TTFT p95",
    "ITL p95",
    "E2E p95",
    "In/s",
    "Out/s",
    "Limit",
    "Seen",
]
PERCENTILES = {"p50": 12.3, "p95": 45.6, "p99": 78.9, "count": 100}
NUMBERS = {
    "model": "meta-llama/Llama-3.3-70B-Instruct", "running": 1234, "waiting": 1234, "saturation": 1.23,
    "kv_cache_usage": 0.99, "prefix_hit_rate": 0.123, "prompt_tokens_per_second": 123_456.0, "last_seen": 33.0,
    "generation_tokens_per_second": 12_345.0, "limit": "kv_transfer", "limit_share": 0.91,
    **dict.fromkeys(("ttft", "inter_token", "e2e"), PERCENTILES),
}  # fmt: skip
COUNT_SHIFTS = """
window.shifted = 0;
new PerformanceObserver(list => list.getEntries().forEach(each => { window.shifted += each.value; }))
    .observe({ type: "layout-shift", buffered: true });
"""
STUCK = Progress(0, steps=5, unfinished=2, step_age=70.0, stack=["model.py:7 forward"])
UNKNOWN = "\N{EN DASH}"
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Start a browser."""
    async with async_playwright() as driver:
        started = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        await started.close()


def base(exporter: Exporter) -> str:
    """Return scheme, host and port."""
    return exporter.url.removesuffix("/metrics")


@contextlib.asynccontextmanager
async def opened(browser: Browser, url: str, **settings: Any) -> AsyncIterator[Page]:
    """Open a page, which may print no error and request nothing in vain or from elsewhere."""
    problems: list[str] = []
    context = await browser.new_context(**settings)
    page = await context.new_page()
    page.on("console", lambda m: problems.append(m.text) if m.type != "log" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("requestfailed", lambda request: problems.append(f"{request.url} failed"))
    page.on(
        "request",
        lambda r: problems.append(r.url) if not r.url.startswith(url.rstrip("/")) else None,
    )
    await page.goto(url)
    yield page
    # Requests that are open when a page closes count as failed.
    found = [*problems]
    await context.close()
    assert found == []


def heat_map_sums(page: Page) -> Locator:
    """Return the text of a heat map that shows observations."""
    return page.locator(".heatmap .readout", has_text="observations, most of them").first


async def fill_heat_maps(exporter: Exporter, page: Page) -> None:
    """Replay a recording until heat maps show it: they count what comes after a first sample."""
    sums = heat_map_sums(page)
    deadline = time.monotonic() + 60.0
    while not await sums.count() and time.monotonic() < deadline:
        await replay(exporter, recorded_run("core_aborts"))
        await asyncio.sleep(2.0)
    await expect(sums).to_be_visible()


async def tiles(page: Page) -> dict[str, str]:
    """Return the numbers of all engines as one."""
    texts = await page.locator("#tiles > div").evaluate_all(
        "all => all.map(each => [...each.children].map(child => child.textContent))"
    )
    return dict(texts)


async def cells(page: Page, engine: str) -> dict[str, str]:
    """Return the row of an engine by the titles of its columns.

    Both are read at one moment: the next answer may add a column.
    """
    heads, row = await page.locator("#table").evaluate(
        """(table, id) => [`thead th`, `tbody tr[data-id="${id}"] td`].map(
            found => [...table.querySelectorAll(found)].map(cell => cell.textContent))""",
        engine,
    )
    return dict(zip((head.rstrip(" ▴▾") for head in heads), row, strict=True))


async def with_all_numbers(route: Route) -> None:
    """Answer as the exporter does, with wide numbers for every default column."""
    # The page or the exporter may be gone meanwhile.
    with contextlib.suppress(PlaywrightError):
        response = await route.fetch()
        live = await response.json()
        for row in live["engines"]:
            row.update(NUMBERS)
        await route.fulfill(response=response, json=live)


async def test_numbers_equal_the_metrics_page(start: Start, browser: Browser) -> None:
    """At the moment at which both are read."""
    async with start() as exporter, connect(exporter) as peer:
        await peer.send_hello(engines=2)
        gauges = VllmStats(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.25)
        more = VllmStats(num_running_reqs=12_345, kv_cache_usage=0.75)
        await peer.send(batch(1, VllmStep(0, 1.0, 1.0, gauges), VllmStep(1, 1.0, 1.0, more)))
        await until(lambda: exporter.intake.items == 2)
        async with opened(browser, base(exporter)) as page:
            await expect(page.locator("#tiles")).to_contain_text("Running")
            found = parse(await get(exporter.url))
            running = {
                dict(key)["engine"]: value
                for (_, key), value in found["vllm:num_requests_running"].samples.items()
            }
            assert running == {"s0": 3, "s1": 12_345}
            shown = {name: await cells(page, name) for name in running}
            total = await tiles(page)
    assert total["Running"] == "12\u202f348"
    assert [shown[name]["Run"] for name in ("s0", "s1")] == ["3", "12\u202f345"]
    assert [shown[name]["Wait"] for name in ("s0", "s1")] == ["2", "0"]
    assert [shown[name]["KV"] for name in ("s0", "s1")] == ["25 %", "75 %"]
    # No request has ended yet: not known is not zero, and no engine has a column for it.
    assert total["TTFT p95"] == UNKNOWN
    assert "TTFT p95" not in shown["s0"]


async def test_what_to_do_names_the_engines_own_settings(start: Start, browser: Browser) -> None:
    """Before what helps with any engine."""
    async with start() as exporter, connect(exporter) as peer:
        await peer.send_hello()
        full = VllmStats(num_running_reqs=9, num_waiting_reqs=7, kv_cache_usage=1.0)
        await peer.send(batch(1, VllmStep(0, 1.0, 1.0, full)))
        async with opened(browser, base(exporter)) as page:
            await expect(page.locator("#attention")).to_contain_text(
                "What to do: Raise --gpu-memory-utilization"
            )


@pytest.mark.usefixtures("kept_log")
async def test_without_engines_it_says_how_to_connect_one(start: Start, browser: Browser) -> None:
    """With the endpoint to copy, and with what was refused."""
    async with start() as exporter, opened(browser, base(exporter)) as page:
        await expect(page.locator("#connect")).to_be_visible()
        await expect(page.locator("#fleet")).to_be_hidden()
        (endpoint,) = exporter.endpoints
        await expect(page.locator("#commands code").first).to_have_text(
            f"SIDESTEP_ENDPOINT={endpoint} vllm serve MODEL"
        )
        async with connect(exporter) as peer:
            await peer.send(Hello(99, "old", 1, 1, 1, [EngineInfo("ns/m/0", "vllm", {})]))
            await expect(page.locator("#warnings")).to_contain_text("refused")
        async with process(exporter):
            await expect(page.locator("#engines")).to_be_visible()
        await expect(page.locator("#connect")).to_be_hidden()


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1440, 900)])
async def test_the_first_screen_says_what_is_wrong(
    start: Start, browser: Browser, width: int, height: int
) -> None:
    """Verdict, engine, stack and every default column are on it, and nothing moves as data come."""
    viewport = {"width": width, "height": height}
    async with start() as exporter, process(exporter, LONG_NAME) as stuck:
        stuck.progress = [STUCK]
        health = exporter.intake.health
        await until(lambda: any(found.state is EngineState.STALLED for _, found in health))
        async with opened(browser, base(exporter), viewport=viewport) as page:
            await page.route("**/api/v1/live", with_all_numbers)
            await page.evaluate(COUNT_SHIFTS)
            verdict = page.locator("#verdict.critical")
            heading = verdict.locator("h2")
            await expect(heading).to_have_text("■ 1 engine needs attention", timeout=20_000)
            await expect(verdict).to_contain_text(f"{LONG_NAME} is stalled: no progress for")
            await expect(verdict).to_contain_text("What to do: Look at")
            await expect(verdict.get_by_label("Stack")).to_be_visible()
            stack = await verdict.get_by_label("Stack").bounding_box()
            assert stack is not None
            assert stack["y"] + stack["height"] < height / 2
            row = page.locator(f'#table tr[data-id="{LONG_NAME}"]')
            await expect(row.locator(".state")).to_contain_text("stalled")
            # Columns without numbers appear with the next answer.
            await expect(page.locator("#table th")).to_have_count(len(DEFAULT_COLUMNS))
            titles = await page.locator("#table th").all_text_contents()
            assert [title.rstrip(" ▴▾") for title in titles] == DEFAULT_COLUMNS
            for cell in await page.locator("#table th").all():
                box = await cell.bounding_box()
                assert box is not None
                assert 0 <= box["x"] <= box["x"] + box["width"] <= width
                assert box["y"] < height
            assert await row.locator("a").text_content() == LONG_NAME
            before = await page.locator("#connection").text_content()
            await expect(page.locator("#connection")).not_to_have_text(str(before))
            assert await page.evaluate("window.shifted") < 0.05
            await page.unroute_all(behavior="ignoreErrors")


async def test_a_link_leads_from_the_verdict_to_the_details(start: Start, browser: Browser) -> None:
    """They have the whole stack and the streams; Escape goes back. The row names the state once."""
    async with (
        start() as exporter,
        process(exporter, "ns/stuck/0") as stuck,
        opened(browser, base(exporter)) as page,
    ):
        stuck.progress = [STUCK]
        link = page.locator("#attention").get_by_role("link", name="ns/stuck/0")
        await link.press("Enter", timeout=20_000)
        await expect(page.locator("#detail").get_by_label("Stack")).to_have_text(
            "model.py:7 forward"
        )
        await page.locator("#configuration summary", has_text="Streams").click()
        await expect(page.locator("#configuration")).to_contain_text("Retransmitted")
        assert page.url.endswith("#engine=ns%2Fstuck%2F0")
        state = str((await cells(page, "ns/stuck/0"))["State"])
        assert re.fullmatch("■stalled [0-9]+ (s|min)", state), state
        await page.keyboard.press("Escape")
        await expect(page.locator("#details")).to_be_hidden()


async def test_where_the_time_goes(start: Start, browser: Browser) -> None:
    """Parts of an engine's requests and its limits have bars, and its slowest requests a time line."""
    async with start() as exporter, opened(browser, base(exporter)) as page:
        await replay(exporter, recorded_run("core_aborts"))
        (name,) = exporter.registry.engines
        engine = exporter.registry.engines[name]
        count = part_counter(engine)
        assert count is not None
        limits = engine.layout.find("sidestep_step_limit_seconds_total")
        slot = limits.slots[limits.row.closed.index("kv_blocks")]
        bars = page.locator("#parts .bar-line"), page.locator("#limits .bar-line")

        async def are_shown() -> bool:
            # Only increases since the first sample count.
            count({"queue.kv_blocks": 30_000.0, "decode": 10_000.0})
            engine.values[slot] = (engine.values[slot] or 0) + 1_000_000
            await asyncio.sleep(0.5)
            return all([await each.count() for each in bars])

        await until(are_shown, 40.0, "a bar and a strip")
        await expect(page.locator("#parts .summary")).to_have_text(
            "queue, kv blocks 75 %, decode 25 %"
        )
        await expect(page.locator("#limits .summary")).to_have_text("kv_blocks 100 %")
        await expect(page.locator("#limits-legend")).to_have_text("kv_blocks")
        assert (await cells(page, name))["Limit"] == "kv_blocks 100 %"
        await page.locator("#table tbody a").click()
        requests = page.locator("#requests li")
        await expect(requests).to_have_count(3)
        await expect(requests.first).to_contain_text("decode")
        found = await Axe().run(page, options=AXE)
    assert found.violations_count == 0, found.generate_report()


async def test_many_engines_are_sorted_filtered_and_paged(start: Start, browser: Browser) -> None:
    """256 engines: the first page is there at once."""
    async with start() as exporter, connect(exporter) as peer:
        await peer.send_hello(engines=256)
        await until(lambda: len(exporter.registry.engines) == 256)
        async with opened(browser, base(exporter)) as page:
            rows = page.locator("#table tbody tr")
            await expect(rows).to_have_count(25)
            paint = await page.evaluate(FIRST_PAINT)
            print(f"\nfirst paint with 256 engines: {paint:.0f} ms")  # noqa: T201 - measured, not asserted
            await expect(page.locator("#range")).to_have_text("1 to 25 of 256")
            await page.get_by_role("button", name="Next").click()
            await expect(page.locator("#range")).to_have_text("26 to 50 of 256")
            await page.get_by_role("button", name="Engine", exact=True).click()
            first = page.locator("#table tbody tr td").first
            ascending = await first.text_content()
            await page.get_by_role("button", name="Engine ▴").click()
            await expect(first).not_to_have_text(str(ascending))
            assert await first.locator("a").get_attribute("href") is not None
            await page.get_by_label("Filter").fill(str(ascending))
            await expect(rows.first).to_contain_text(str(ascending))
            await page.get_by_label("Filter").fill("no such engine")
            await expect(rows).to_have_count(0)


async def test_an_exporter_that_is_gone_is_not_well(start: Start, browser: Browser) -> None:
    """The page and its title say so, grey; later they show the engines of the next exporter."""
    settings = {"web_listen_address": (f"127.0.0.1:{free_port()}",)}
    context = await browser.new_context()
    page = await context.new_page()
    async with start(**settings) as exporter, process(exporter, "ns/first/0"):
        await page.goto(base(exporter))
        await expect(page.locator("#verdict.ok")).to_contain_text(
            "1 engine is well", timeout=20_000
        )
    await expect(page.locator("#connection.lost")).to_contain_text("disconnected")
    await expect(page.locator("#verdict.unknown")).to_contain_text("the exporter does not answer")
    await expect(page).to_have_title(re.compile("^sidestep: the exporter does not answer"))
    await expect(page.locator("body.lost")).to_have_count(1)
    await expect(page.locator("#icon")).to_have_attribute("href", "ui/icon-grey.svg")
    await page.get_by_role("link", name="ns/first/0").click()
    await expect(page.locator("#verdict")).not_to_contain_text("well")
    async with start(**settings) as exporter, process(exporter, "ns/second/0"):
        await expect(page.locator("#verdict.ok")).to_contain_text("well", timeout=20_000)
        await expect(page.locator("#table")).to_contain_text("ns/second/0")
        await expect(page.locator("#table")).not_to_contain_text("ns/first/0")
        await expect(page.locator("body.lost")).to_have_count(0)
    await context.close()


async def test_engines_that_have_all_stopped_are_not_well(start: Start, browser: Browser) -> None:
    """Nor are they full by their last gauges; doctor and the page say the same."""
    async with start() as exporter, connect(exporter) as peer:
        await peer.send_hello(engines=2)
        full = VllmStats(num_running_reqs=19, num_waiting_reqs=7, kv_cache_usage=0.99)
        await peer.send(batch(1, *(VllmStep(n, 1.0, 1.0, full) for n in range(2))))
        async with opened(browser, base(exporter)) as page:
            verdict = page.locator("#verdict.warning")
            await expect(verdict).to_contain_text("is full: 7 requests wait", timeout=20_000)
            await expect(verdict).to_contain_text("2 engines need attention")
            await page.get_by_role("button", name="Needs attention 2").click()
            await expect(page.locator("#table tbody tr")).to_have_count(2)
            await expect(page.locator("#table tbody tr").first).to_contain_text("ok, full")
            await peer.send(Bye(1, 2))
            await expect(page.locator("#table tbody tr")).to_have_count(0)
            await page.get_by_role("button", name="Needs attention 0").click()
            await expect(page.locator("#verdict.quiet")).to_contain_text("2 engines have stopped")
            assert "Run" not in await cells(page, "s0")
            findings = json.loads(await get(base(exporter) + "/api/v1/doctor"))["findings"]
    assert "SD140" in {each["code"] for each in findings}
    assert "SD141" not in {each["code"] for each in findings}


async def test_it_needs_the_password_of_everything_else(
    start: Start, browser: Browser, tmp_path: Path
) -> None:
    """Neither the page nor its data nor its files are there without it."""
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    (tmp_path / "web.yml").write_text(f"basic_auth_users:\n  sre: {hashed}\n")
    async with (
        start(web_config_file=str(tmp_path / "web.yml")) as exporter,
        aiohttp.ClientSession() as session,
    ):
        for path in ("/", "/ui/main.js", "/api/v1/live", "/api/v1/live/history"):
            async with session.get(base(exporter) + path) as answer:
                assert answer.status == 401
        login = {"username": "sre", "password": "secret"}
        async with opened(browser, base(exporter), http_credentials=login) as page:
            await expect(page.locator("#connection")).to_contain_text("live")


async def test_findings_say_what_to_do(start: Start, browser: Browser) -> None:
    """Errors and warnings of the exporter's own checks, not what is only worth knowing."""
    target = ("http://127.0.0.1:9/metrics",)
    async with start(scrape=target) as exporter, opened(browser, base(exporter)) as page:
        findings = page.locator("#findings")
        await expect(findings).to_contain_text("SD124 error", timeout=30_000)
        await expect(findings).to_contain_text("Open its address")
        await expect(findings).not_to_contain_text("SD120")


async def test_the_curve_of_an_engine_that_sends_lookups(start: Start, browser: Browser) -> None:
    """Its details have the hit ratio by size and what follows of it; all engines as one have none."""
    info = EngineInfo("ns/m/0", "vllm", {"engine": "0", "model_name": "m"})
    other = EngineInfo("ns/m/1", "vllm", {"engine": "1", "model_name": "m"})
    # Where no time lines are kept, none are requested.
    flags = {"kv_sample_rate": "1", "web_disable_timeline": True}
    async with start(**flags) as exporter, opened(browser, base(exporter)) as page:
        publisher = Publisher(exporter.endpoints[0], "s", [info, other])
        await until(lambda: publisher.connected, 10, "the connection")
        cache = await asyncio.to_thread(serve, publisher)
        await until(lambda: publisher.drained, 20, "all items")
        await expect(page.locator("#curve")).to_be_hidden()
        await page.locator('#table tr[data-id="ns/m/0"] a').click()
        facts = page.locator("#curve-facts")
        await expect(facts).to_contain_text("Within one point of the best", timeout=30_000)
        await expect(facts).to_contain_text(f"Found now{cache.found / cache.tokens:.0%}"[:-1])
        await expect(page.locator("#curve-plot canvas")).to_be_visible()
        await page.get_by_text("Curve as a table").click()
        rows = await page.locator("#curve-table tbody tr").all_text_contents()
        found = await Axe().run(page, options=AXE)
        await page.locator('#table tr[data-id="ns/m/1"] a').click()
        await expect(page.locator("#curve")).to_be_hidden()
        publisher.close()

    assert found.violations_count == 0, found.generate_report()
    assert [row.split("x")[0] for row in rows][:3] == ["0.13", "0.25", "0.5"]
    assert "1x800800 MiB" in rows[4]


async def test_everyone_can_use_it(start: Start, browser: Browser) -> None:
    """Charts move; no rule of accessibility is broken and nothing scrolls sideways, in any form."""
    async with start() as exporter, process(exporter, "ns/m/0") as stuck:
        async with opened(browser, base(exporter)) as page:
            await fill_heat_maps(exporter, page)
            await expect(page.locator("#charts .plot canvas")).to_have_count(6)
            chart = page.locator("#charts .plot canvas").first
            drawn = await chart.evaluate("canvas => canvas.toDataURL()")

            async def has_moved() -> bool:
                return bool(await chart.evaluate("canvas => canvas.toDataURL()") != drawn)

            await until(has_moved, 5.0, "a chart that moves")
        stuck.progress = [STUCK]
        for scheme, width in (("light", 390), ("dark", 768), ("light", 1280)):
            settings = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}}
            async with opened(browser, base(exporter), **settings) as page:
                await expect(heat_map_sums(page)).to_be_visible()
                await page.locator("#table").get_by_role("link", name="ns/m/0").click()
                await expect(page.locator("#details")).to_be_visible()
                is_wide = "document.documentElement.scrollWidth > innerWidth"
                assert not await page.evaluate(is_wide), settings
                found = await Axe().run(page, options=AXE)
                assert found.violations_count == 0, f"{settings}: {found.generate_report()}"


async def test_files_are_served_once_and_strictly(start: Start) -> None:
    """With a policy, without guessing of types, and not again to a client that has them."""
    async with start() as exporter, aiohttp.ClientSession() as session:
        for path in ("/", "/ui/main.js", "/ui/uPlot.js", "/ui/style.css", "/ui/icon.svg"):
            async with session.get(base(exporter) + path) as answer:
                assert answer.status == 200
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                tag = answer.headers["ETag"]
            async with session.get(base(exporter) + path, headers={"If-None-Match": tag}) as answer:
                assert (answer.status, await answer.read()) == (304, b"")
        for path in ("/ui/index.html", "/ui/SHA256SUMS", "/ui/..%2Froutes.py", "/ui/"):
            async with session.get(base(exporter) + path) as answer:
                assert answer.status == 404
    async with start(web_disable_ui="true") as exporter, aiohttp.ClientSession() as session:
        async with session.get(base(exporter) + "/") as answer:
            assert "uPlot" not in await answer.text()
        async with session.get(base(exporter) + "/ui/main.js") as answer:
            assert answer.status == 404


async def test_vendored_files_are_those_of_the_release() -> None:
    """A file that was changed here has another checksum; the licence is beside them."""
    folder = Path(str(FOLDER)) / "vendor"
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert {path.name for path in folder.iterdir()} == {*sums, "SHA256SUMS"}
    assert "uPlot.LICENSE" in sums
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
