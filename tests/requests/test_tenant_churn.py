"""Tenants that come and go: memory and series of an exporter are bounded.

``CHURN_TENANTS=1000000`` makes the long run.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from exporter_processes import process
from exporters import until
from pages import get, parse
from sidestep.protocol.limits import OTHER
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.request_events import (
    Event,
    Finished,
    Identity,
    Iteration,
    Output,
    Prompt,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep_adapters.publisher.publisher import Publisher

ENGINE = EngineInfo(
    "e",
    "vllm",
    {"engine": "0", "model_name": "m"},
    {"core:cache_config": {"block_size": "16"}},
    features=["engine_core"],
)
DISTINCT = int(os.environ.get("CHURN_TENANTS", "10000"))
SCRAPES = 110
SHOWN = 100
HEAVY = 40
"""Heavy tenants of a phase; another phase has others."""
PHASES = 8
MIB = 1 << 20
GROWTH = 64 * MIB
HELD = 4 * MIB
"""Bytes that the publisher may hold back before no more requests are made."""
PRICE = "*,input=0.5,cached=0.05,output=1.5"


class Load:
    """Requests of tenants, each of which ends in the item in which it begins."""

    def __init__(self) -> None:
        self.random = random.Random(7)
        self.number = 0
        self.now = 1000.0
        self.requests: Counter[str] = Counter()

    def item(self, tenants: Sequence[str]) -> RequestEvents:
        """Return a request for each of ``tenants``."""
        events: list[Event] = []
        for tenant in tenants:
            self.number += 1
            self.now += 0.001
            number, at, tokens = self.number, self.now, self.random.randint(1, 9)
            prompt = self.random.randint(1, 99)
            self.requests[tenant] += 1
            events += [
                Queued(number, at, 1e9 + at, prompt, identity=Identity("", "", tenant)),
                Scheduled(number, at),
                Iteration(
                    at, at + 0.01, 1e9 + at, [Output(at + 0.01, [number], [tokens])],
                    prompts=[Prompt(number, prompt - prompt // 2, prompt // 2)],
                ),
                Finished(number, at + 0.02, 1e9 + at, self.random.choice((0, 1, 3)), prompt, tokens),
            ]  # fmt: skip
        return RequestEvents(0, self.now, 1, events)


@asynccontextmanager
async def publishing(folder: Path) -> AsyncIterator[Publisher]:
    """Yield a publisher that is closed at the end."""
    publisher = Publisher(f"ipc://{folder}/i.ipc", "s", [ENGINE], flush_interval=0.01)
    try:
        yield publisher
    finally:
        await asyncio.to_thread(publisher.close, 0.5)


async def shown(url: str) -> dict[str, float]:
    """Return the requests of the tenants on a page."""
    family = "sidestep_tenant_requests"
    page = parse(await get(f"{url}?name[]={family}_total"))
    return {dict(labels)["tenant"]: n for (_, labels), n in page[family].samples.items()}


def resident(pid: int) -> int:
    """Return the memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def test_many_tenants_pass(tmp_path: Path) -> None:
    """Memory and series are bounded, and no request is lost."""
    load = Load()
    flags = ("--tenants.by", "cache-salt", "--tenants.max", SHOWN, "--prices.model", PRICE)
    before: dict[str, float] = {}
    moved = light = first = 0
    async with (
        process(tmp_path, *flags) as (exporter, url),
        publishing(tmp_path) as publisher,
    ):
        for scrape in range(SCRAPES):
            phase = scrape * PHASES // SCRAPES
            for _ in range(DISTINCT // SCRAPES // 60 + 1):
                tenants = [f"t{light + number}" for number in range(60)]
                light += len(tenants)
                tenants += [f"heavy{phase}-{load.random.randrange(HEAVY)}" for _ in range(40)]
                publisher.push(load.item(tenants))
                await until(lambda: publisher.held_bytes < HELD)
            if not scrape:
                await until(lambda: publisher.drained)
            now = await shown(url)
            assert len(now) <= SHOWN + 1
            first = first or resident(exporter.pid)
            moved += len(before.keys() - now.keys())
            before = now
        await until(lambda: publisher.drained)
        now, memory = await shown(url), resident(exporter.pid)
    assert sum(now.values()) == load.number
    assert all(now[name] <= load.requests[name] for name in now.keys() - {OTHER})
    assert light >= DISTINCT
    assert moved > HEAVY, "tenants leave"
    assert memory - first <= GROWTH
    sys.stdout.write(
        f"{light:,} tenants, {load.number:,} requests, {moved} left, memory"
        f" {first / MIB:.1f} MiB, then {memory / MIB:.1f} MiB\n"
    )
