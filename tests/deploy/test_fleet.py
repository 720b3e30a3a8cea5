"""Prometheus agents that write into one store, as docs/fleet.md sets them up."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import counting_page
from counting_page import READS
from exporters import MAIN_RUN, SPEC_RUN, Start
from manifests import ROOT
from pages import get, parse
from prometheus_server import AGENT, BINARIES, Prometheus
from replays import replay

FLEET = ROOT / "deploy" / "fleet"
TOKENS = "vllm:generation_tokens_total"


def agent(directory: Path, shard: int, store: int, urls: list[str]) -> Path:
    """Write the configuration of an agent with this shard, store and targets, and short intervals.

    The page counts a scrape even if its answer is too late, so the timeout is a whole second.
    """
    text = (FLEET / "agent.yml").read_text()
    for ours, its in (
        ('regex: "0"', f'regex: "{shard}"'),
        ("http://store:9090", f"http://127.0.0.1:{store}"),
        ("scrape_interval: 15s", "scrape_interval: 1s\n  scrape_timeout: 1s"),
        ("max_backoff: 5s", "max_backoff: 100ms\n      batch_send_deadline: 100ms"),
    ):
        assert ours in text
        text = text.replace(ours, its)
    (directory / "targets").mkdir(parents=True)
    targets = [url.split("/")[2] for url in urls]
    (directory / "targets" / "all.json").write_text(json.dumps([{"targets": targets}]))
    (directory / "agent.yml").write_text(text)
    return directory / "agent.yml"


@asynccontextmanager
async def counting() -> AsyncIterator[str]:
    """Run a page that counts its requests in a process of its own; yield its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, counting_page.__file__, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.wait()


async def running(stack: AsyncExitStack, server: Prometheus) -> None:
    """Start a server that the stack stops."""
    stack.push_async_callback(asyncio.to_thread, server.stop)
    await asyncio.to_thread(server.start)


async def scraped(agents: list[Prometheus]) -> float:
    """Return the samples that the agents have appended so far; an agent has no count before its first."""
    pages = [parse(await asyncio.to_thread(one.page, "/metrics")) for one in agents]
    name = "prometheus_agent_samples_appended"
    return sum(sum(page[name].samples.values()) for page in pages if name in page)


async def test_an_outage_of_the_store_loses_no_scrape(
    tmp_path: Path, start: Start, version: str
) -> None:
    """After an outage of the store, every scrape is there once, and totals agree."""
    binary = str(BINARIES[version])
    endpoint = f"ipc://{tmp_path}/ingest/ingest.ipc"
    async with AsyncExitStack() as stack:
        exporter = await stack.enter_async_context(start(ingest_endpoint=(endpoint,)))
        pages = [await stack.enter_async_context(counting()) for _ in range(4)]
        store = Prometheus(
            binary, FLEET / "store.yml", "--web.enable-remote-write-receiver",
            f"--storage.tsdb.path={tmp_path}/store",
        )  # fmt: skip
        await running(stack, store)
        agents = []
        for shard in (0, 1):
            directory = tmp_path / f"agent{shard}"
            config = agent(directory, shard, store.port, [exporter.url, *pages])
            wal = f"--storage.agent.path={directory}/wal"
            agents.append(Prometheus(binary, config, AGENT[version], wal))
            await running(stack, agents[-1])
        everyone = {url.split("/")[2] for url in pages}
        await asyncio.to_thread(store.until, READS, lambda found: set(found) == everyone)

        await asyncio.to_thread(store.stop)
        for n, run in enumerate((MAIN_RUN, SPEC_RUN)):
            await replay(exporter, run, f"pod-{n}")
        before = await scraped(agents)
        async with asyncio.timeout(60):
            while await scraped(agents) < before + 2000:
                await asyncio.sleep(0.1)
        await asyncio.to_thread(store.start)

        seen = {
            name: found[-1][1]
            for name, found in (await asyncio.to_thread(store.samples, READS)).items()
        }
        await asyncio.to_thread(
            store.until,
            READS,
            lambda found: all(found.get(name, 0) > seen.get(name, 0) + 8 for name in everyone),
        )
        stored = await asyncio.to_thread(store.samples, READS)
        tokens = {float(one["value"][1]) for one in await asyncio.to_thread(store.ask, TOKENS)}
        page = parse(await get(exporter.url))

    for found in stored.values():
        numbers = [value for _, value in found]
        assert numbers == [float(n) for n in range(1, len(numbers) + 1)]
    assert set(stored) == everyone
    assert tokens == set(page["vllm:generation_tokens"].samples.values())
