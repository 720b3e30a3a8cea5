"""`sidestep doctor --engine-page`: recorded pages of engines, as they are and with a fault each."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from command_line import one_line, sidestep
from exporters import DATA, MAIN_RUN, Start, page_of_engine
from growing_page import growing_page
from ports import free_port
from replays import replay
from sidestep.diagnosis.finding import Finding
from sidestep_tools.doctor.engine_page import check, parse
from web_servers import server

RECORDED = sorted(path.name.removesuffix(".txt.gz") for path in DATA.glob("page_*.txt.gz"))


def found(text: str) -> list[Finding]:
    """Check a page."""
    return list(check([parse("page", text)]))


def codes(text: str) -> set[str]:
    """Return the codes of a page's findings that are not of recorded pages, too."""
    return {each.code for each in found(text)} - {"SD211"}


async def command(*pages: object) -> list[tuple[str, str]]:
    """Run the command beside the servers of the test; return codes and texts."""
    options = [f"--engine-page={page}" for page in pages]
    done = await asyncio.to_thread(sidestep, "doctor", "--json", *options)
    assert done.stderr == ""
    return [(each["code"], each["text"]) for each in json.loads(done.stdout)["findings"]]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_pages(name: str) -> None:
    """Nothing is wrong with the pages of real engines; one has nothing but metrics of a model's own."""
    severities = {each.severity for each in found(page_of_engine(name))}
    assert severities <= ({"warning"} if name == "page_triton_custom" else {"info"})


async def test_an_exporter(start: Start, tmp_path: Path) -> None:
    """Its page is good; Prometheus should not scrape the engine's own as well."""
    (tmp_path / "own.txt").write_text(page_of_engine("page_main"))
    async with start() as exporter:
        assert [code for code, _ in await command(exporter.url)] == ["SD206"]
        await replay(exporter, MAIN_RUN, "replay")
        alone = {code for code, _ in await command(exporter.url)}
        both = dict(await command(tmp_path / "own.txt", exporter.url))
    assert alone <= {"SD211", "SD215"}
    assert "engine=0" in both["SD210"]


def test_an_engines_address() -> None:
    """The engine's own page is checked where no exporter answers, by its address or that of the page."""
    with growing_page(page_of_engine("page_main")) as url:
        for address in (url, url.removesuffix("/metrics"), url.partition("//")[2]):
            done = sidestep("doctor", "--json", address)
            assert [each["code"] for each in json.loads(done.stdout)["findings"]] == ["SD211"]


def test_sglang_before_its_first_report() -> None:
    """It has set what it knows at its start only."""
    page = page_of_engine("page_sglang")
    assert not codes(
        re.sub(r"^sglang:(?!max_total_num_tokens|http).*\n", "", page, flags=re.MULTILINE)
    )


def edited(pattern: str, text: str = "", name: str = "page_main") -> str:
    """Return a recorded page with what ``pattern`` matches replaced."""
    page = page_of_engine(name)
    changed = re.sub(pattern, text, page, flags=re.MULTILINE)
    assert changed != page
    return changed


def of_two_models(page: str) -> str:
    """Return a page with the series of an engine a second time, from another source."""
    lines = [line for line in page.splitlines() if line.startswith("vllm:")]
    more = [line.replace("{", '{origin="other",') for line in lines]
    return page + "\n".join([*more, ""])


FAULTS: dict[str, list[Callable[[], str]]] = {
    "SD206": [lambda: "# TYPE up gauge\nup 1\n"],
    "SD207": [
        lambda: edited(r"^(# .... )?vllm:.*\n"),
        lambda: edited(r"^(# .... )?vllm:num_requests_running.*\n"),
        lambda: edited(r"^(# .... )?sglang:(?!scheduler|http).*\n", name="page_sglang"),
    ],
    "SD208": [lambda: 2 * page_of_engine("page_spec")],
    "SD209": [lambda: of_two_models(page_of_engine("page_spec"))],
    "SD212": [
        lambda: edited("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        lambda: edited("sglang:inter_token_latency", "sglang:time_per_output_token", "page_sglang"),
    ],
    "SD213": [
        lambda: edited(r"\Z", "# TYPE vllm:gpu_cache_usage_perc gauge\n"),
    ],
    "SD215": [lambda: edited(r"^vllm:cache_config_info.*\n")],
    "SD218": [
        lambda: edited(r"^(# .... )?vllm:time_to_first_token_seconds.*\n"),
        lambda: edited(r"^(# .... )?sglang:time_to_first.*\n", name="page_sglang"),
    ],
    "SD219": [
        lambda: edited("vllm:", "ray_vllm_"),
        lambda: edited("sglang:", "sglang_", "page_sglang"),
    ],
}


@pytest.mark.parametrize(
    ("code", "page"), [(code, page) for code, pages in FAULTS.items() for page in pages]
)
def test_faults(code: str, page: Callable[[], str]) -> None:
    """A fault of a page has its code; some bring others along."""
    also = {"SD208": {"SD209"}}
    text = page()
    assert code in codes(text)
    assert codes(text) - {code} <= also.get(code, set())


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ("[]", 200, "SD204"),
        ('{"detail": "Not Found"}', 404, "SD203"),
        ("denied", 401, "SD202"),
        ("<!doctype html><title>Sign in</title>", 200, "SD205"),
        ("", 200, "SD205"),
    ],
)
async def test_answers_that_are_no_page(body: str, status: int, code: str) -> None:
    """Each has its code; without a path, /metrics is asked for."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=body, status=status)

    async with server(answer) as url:
        assert [found for found, _ in await command(url)] == [code]


async def test_no_answer(tmp_path: Path) -> None:
    """A server that does not run; a path that is neither a file nor an address is a usage error."""
    assert [code for code, _ in await command(f"http://127.0.0.1:{free_port()}")] == ["SD201"]
    one_line(sidestep("doctor", "--engine-page", tmp_path / "page.txt"), 2, "must be a URL")
