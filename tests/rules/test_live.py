"""The rules in a real Prometheus, over real engines' runs: none fails, and what is recorded has data."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from exporters import DATA, MAIN_RUN, Start, page_of_engine
from fleet import OBJECTIVES
from polled import page, polled
from ramped import overload
from rulefiles import ROOT, groups, recordings
from sidestep.app import Exporter
from sidestep_adapters.recording.replay import Replay

BINARIES = {
    "2": shutil.which("prometheus"),
    "3": shutil.which("prometheus", path=ROOT / "build" / "prometheus-3" / "usr" / "bin"),
}
RUNS = [MAIN_RUN, *(DATA / f"{name}.rec.gz" for name in ("core_dp", "sglang_dp", "sglang_labels"))]


async def play(exporter: Exporter) -> None:
    """All runs, each as hosts of its own, and an engine that has more to do than it can."""
    for run in RUNS:
        player = Replay(run, exporter.endpoints[0], realtime=False, namespace=run.name)
        await asyncio.to_thread(player.run)
    await overload(exporter)


def configure(directory: Path, targets: dict[str, str]) -> None:
    """Write what a Prometheus reads that evaluates our rules every second."""
    directory.mkdir()
    for name in ("recording.yaml", "alerts.yaml"):
        quick = [{**group, "interval": "1s"} for group in groups(name)]
        (directory / name).write_text(yaml.safe_dump({"groups": quick}))
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "rule_files": ["recording.yaml", "alerts.yaml"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [url.split("/")[2]]}]}
            for job, url in targets.items()
        ],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))


@contextlib.asynccontextmanager
async def prometheus(binary: str, directory: Path, targets: dict[str, str]) -> AsyncIterator[str]:
    """The URL of one with our rules."""
    configure(directory, targets)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        binary, f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/tsdb", f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


async def ask(session: aiohttp.ClientSession, url: str, **params: str) -> Any:
    """What the API says, None while nobody listens."""
    with contextlib.suppress(aiohttp.ClientError):
        async with session.get(url, params=params) as answer:
            return (await answer.json())["data"]
    return None


async def evaluated(
    session: aiohttp.ClientSession, url: str, exporter: Exporter
) -> tuple[list[dict[str, Any]], set[str]]:
    """Every rule as Prometheus sees it, and what has not been recorded though counters grew."""
    wanted = {rule["record"] for rule in recordings()}
    recorded: set[str] = set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            while not wanted <= recorded:
                await asyncio.sleep(1)
                await play(exporter)
                recorded = set(await ask(session, f"{url}/api/v1/label/__name__/values") or ())
    states = await ask(session, f"{url}/api/v1/rules")
    return [rule for group in states["groups"] for rule in group["rules"]], wanted - recorded


async def test_rules_on_real_runs(start: Start, tmp_path: Path) -> None:
    """vLLM, SGLang with data-parallel ranks and with labels of its own, and Triton; Prometheus 2 and 3."""
    found = {version: binary for version, binary in BINARIES.items() if binary}
    if not found:
        pytest.skip("there is no Prometheus (make tools)")
    async with contextlib.AsyncExitStack() as stack:
        triton = await stack.enter_async_context(polled(page(page_of_engine("page_triton"))))
        exporter = await stack.enter_async_context(start(slo=OBJECTIVES))
        await play(exporter)
        targets = {"sidestep": exporter.url, "triton": triton.url}
        session = await stack.enter_async_context(aiohttp.ClientSession())
        urls = {
            version: await stack.enter_async_context(
                prometheus(binary, tmp_path / version, targets)
            )
            for version, binary in found.items()
        }
        for version, url in urls.items():
            rules, missing = await evaluated(session, url, exporter)

            assert [rule for rule in rules if rule.get("lastError")] == []
            assert {rule["health"] for rule in rules} == {"ok"}
            assert missing == set(), version
