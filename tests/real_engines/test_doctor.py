"""`sidestep doctor` beside real engines: no errors where all is well, and pages as they really look."""

from __future__ import annotations

import asyncio
import json

import pytest

from command_line import sidestep
from real_engines.load import Ask, Client
from real_engines.processes import ExporterProcess, Server
from real_engines.sites import TAP, SglangSite, VllmSite

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


async def test_vllm(vllm: VllmSite) -> None:
    """With plugin and tap; both pages are there, of which one should be scraped."""
    server = vllm.server([*TAP, "--shutdown-timeout", "30"], command=True)
    async with vllm.with_exporter(server) as exporter:
        assert await of_pages(server, exporter) == {"SD210", "SD211"}
        found = await codes(exporter.url, "--endpoint", vllm.endpoint)
    assert "error" not in found.values()


async def test_sglang(sglang: SglangSite) -> None:
    """With the plugin."""
    server = sglang.server()
    async with sglang.with_exporter(server) as exporter:
        assert await of_pages(server, exporter) == {"SD210", "SD211"}


async def test_vllm_with_its_own_metrics_off(vllm: VllmSite) -> None:
    """With `instead`, and --disable-log-stats, which the plugin overrules."""
    instead = {"SIDESTEP_VLLM_MODE": "instead"}
    server = vllm.server(["--disable-log-stats"], instead)
    async with vllm.with_exporter(server) as exporter:
        assert await of_pages(server, exporter) == {"SD207", "SD211"}


async def test_sglang_with_its_own_metrics_off(sglang: SglangSite) -> None:
    """With `instead`."""
    server = sglang.server(environ={"SIDESTEP_SGLANG_MODE": "instead"})
    async with sglang.with_exporter(server) as exporter:
        assert await of_pages(server, exporter) == {"SD207", "SD211"}
