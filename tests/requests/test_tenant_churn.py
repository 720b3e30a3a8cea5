"""Tenants that come and go: sums are exact on every page.

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
PARTS = {"kv_block_seconds": 1e6, "cost": 1e12}
"""Whole numbers that a unit consists of; all other counters are whole."""
TOTALS = {
    "requests": ("vllm:request_success", ()),
    "failed_requests": ("vllm:request_success", ("abort", "error")),
    "prompt_tokens": ("vllm:prompt_tokens_by_source", ("local_compute",)),
    "cached_prompt_tokens": (
        "vllm:prompt_tokens_by_source",
        ("local_cache_hit", "external_kv_transfer"),
    ),
    "generation_tokens": ("vllm:generation_tokens", ()),
    "kv_block_seconds": ("sidestep_kv_block_seconds", ()),
    "cost": ("sidestep_cost", ()),
}
"""Family of the engine, and values of its label, by family of tenants."""
Shown = dict[str, dict[str, int]]
"""Whole numbers by family and tenant."""


class Load:
    """Requests of tenants, each of which ends in the item in which it begins."""

    def __init__(self) -> None:
        self.random = random.Random(7)
        self.number = 0
        self.now = 1000.0
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()

    def item(self, tenants: Sequence[str]) -> RequestEvents:
        """Return a request for each of ``tenants``."""
        events: list[Event] = []
        for tenant in tenants:
            self.number += 1
            self.now += 0.001
            number, at, tokens = self.number, self.now, self.random.randint(1, 9)
            prompt = self.random.randint(1, 99)
            self.requests[tenant] += 1
            self.tokens[tenant] += tokens
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


async def shown(url: str) -> Shown:
    """Return the counters by tenant of a page, after checking that their sums are the engine's counters."""
    names = {f"sidestep_tenant_{name}_total" for name in TOTALS}
    names |= {f"{family}_total" for family, _ in TOTALS.values()}
    page = parse(await get(f"{url}?{'&'.join(f'name[]={name}' for name in sorted(names))}"))
    found: Shown = {}
    for name, (family, values) in TOTALS.items():
        parts = PARTS.get(name, 1)
        tenants = {
            dict(labels)["tenant"]: round(value * parts)
            for (_, labels), value in page[f"sidestep_tenant_{name}"].samples.items()
        }
        own = sum(
            round(value * parts)
            for (_, labels), value in page[family].samples.items()
            if not values or {value for _, value in labels} & {*values}
        )
        assert sum(tenants.values()) == own, name
        assert len(tenants) <= SHOWN + 1, name
        assert min(tenants.values()) >= 0, name
        found[name] = tenants
    return found


def resident(pid: int) -> int:
    """Return the memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def test_many_tenants_pass(tmp_path: Path) -> None:
    """Memory and series are bounded, all sums are exact, and no series of a tenant that stays decreases."""
    load, seen = Load(), Counter[str]()
    flags = ("--tenants.by", "cache-salt", "--tenants.max", SHOWN, "--prices.model", PRICE)
    before: Shown = {}
    moved = light = checked = 0
    async with (
        process(tmp_path, *flags) as (exporter, url),
        publishing(tmp_path) as publisher,
    ):
        first = 0
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
            checked += 1
            first = first or resident(exporter.pid)
            for name, counts in before.items():
                for tenant, count in counts.items():
                    assert now[name].get(tenant, count) >= count, (name, tenant)
            moved += len(before.get("requests", {}).keys() - now["requests"].keys())
            seen.update(now["requests"].keys())
            before = now
        await until(lambda: publisher.drained)
        now, memory = await shown(url), resident(exporter.pid)
    assert sum(now["requests"].values()) == load.number
    assert sum(now["generation_tokens"].values()) == sum(load.tokens.values())
    assert all(
        now["requests"][name] <= load.requests[name] for name in now["requests"].keys() - {OTHER}
    )
    assert light >= DISTINCT
    assert checked >= 100
    assert moved > HEAVY, "tenants leave"
    assert memory - first <= GROWTH
    sys.stdout.write(
        f"{light:,} tenants, {load.number:,} requests, {checked} pages, {moved} left, memory"
        f" {first / MIB:.1f} MiB, then {memory / MIB:.1f} MiB\n"
    )
