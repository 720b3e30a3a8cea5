"""`sidestep doctor` beside real engines: no errors where all is well, and faults as they really look."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from command_line import sidestep
from exporters import until
from real_engines.load import Ask, Client
from real_engines.processes import ExporterProcess, Server
from real_engines.sites import TAP, Site
from sidestep_tools.doctor.environment import processes
from sidestep_tools.doctor.environment.check import check_process

pytestmark = pytest.mark.engine


async def codes(*arguments: str) -> dict[str, str]:
    """Return codes and severities of all findings."""
    done = await asyncio.to_thread(sidestep, "doctor", "--json", *arguments)
    assert done.stderr == ""
    return {each["code"]: each["severity"] for each in json.loads(done.stdout)["findings"]}


async def of_process(server: Server) -> set[str]:
    """Return the codes of a server's process; a wrapper may have started it."""
    own = Path(f"/proc/{server.pid}")
    await until(own.exists, what="the process")
    (process,) = (each for each in processes.find() if each.pid == server.pid)
    found = await asyncio.to_thread(lambda: list(check_process(process)))
    return {each.code for each in found}


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
        assert await of_process(server) == {"SD012"}
        assert await of_pages(server, exporter) == {"SD210", "SD211"}
        found = await codes(exporter.url, "--endpoint", site.endpoint)
    assert "error" not in found.values()


@pytest.mark.parametrize(
    ("site", "flags", "expected"),
    # The plugin overrules --disable-log-stats.
    [("vllm", ["--disable-log-stats"], {"SD024"}), ("sglang", [], set())],
    indirect=["site"],
)
async def test_an_engine_with_its_own_metrics_off(
    site: Site, flags: list[str], expected: set[str]
) -> None:
    """With `instead`."""
    server = site.server(flags, {site.mode: "instead"})
    async with site.with_exporter(server) as exporter:
        assert await of_process(server) == expected
        assert await of_pages(server, exporter) == {"SD207", "SD211"}
