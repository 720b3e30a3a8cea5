"""`sidestep doctor` beside real engines: no errors where all is well, and pages as they really look."""

from __future__ import annotations

import asyncio
import json

import pytest

from command_line import sidestep
from real_engines.load import Ask, Client
from real_engines.processes import ExporterProcess, Server
from real_engines.sites import TAP, Site

pytestmark = pytest.mark.engine


async def codes(*arguments: str) -> dict[str, str]:
    """Return codes and severities of all findings."""
    done = await asyncio.to_thread(sidestep, "doctor", "--json", *arguments)
    assert done.stderr == ""
    return {each["code"]: each["severity"] for each in json.loads(done.stdout)["findings"]}


async def of_pages(server: Server, exporter: ExporterProcess) -> set[str]:
    """Return the codes of the engine's own page and the exporter's, after a few requests."""
    async with Client(server.base) as client:
        for _ in range(3):
            await client.ask(Ask(client.text(30), 20))
    return set(
        await codes("--engine-page", f"{server.base}/metrics", "--engine-page", exporter.url)
    )


@pytest.mark.parametrize(
    ("site", "flags"),
    [("vllm", [*TAP, "--shutdown-timeout", "30"]), ("sglang", [])],
    indirect=["site"],
)
async def test_an_engine_with_the_plugin(site: Site, flags: list[str]) -> None:
    """Nothing is wrong; both pages are there, of which one should be scraped."""
    server = site.server(flags)
    async with site.with_exporter(server) as exporter:
        assert await of_pages(server, exporter) == {"SD210", "SD211"}
        found = await codes(exporter.url, "--endpoint", site.endpoint)
    assert "error" not in found.values()


@pytest.mark.parametrize(
    ("site", "flags"),
    # The plugin overrules --disable-log-stats.
    [("vllm", ["--disable-log-stats"]), ("sglang", [])],
    indirect=["site"],
)
async def test_an_engine_with_its_own_metrics_off(site: Site, flags: list[str]) -> None:
    """With `instead`."""
    server = site.server(flags, {site.mode: "instead"})
    async with site.with_exporter(server) as exporter:
        assert await of_pages(server, exporter) == {"SD207", "SD211"}
