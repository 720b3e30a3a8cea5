"""Lookups in a real engine's prefix cache: the hit ratio of other sizes, and the reasons of misses."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest

from real_engines.comparison import (
    Page,
    assert_nothing_refused,
    parse,
    report,
    settled_alone,
    value,
)
from real_engines.conversations import ask_in_turns, conversations
from real_engines.load import MAIN_ENVIRON, MAIN_FLAGS, Ask, Client
from real_engines.processes import ExporterProcess, Server
from real_engines.sglang_server import post
from real_engines.sites import TAP, SglangSite, Site, VllmSite
from sidestep.metrics.hit_ratio_curves import INTERVAL
from sidestep.tracking.kv_blocks.lookups import REASONS

SIZES = (0.5, 1.0, 2.0, 4.0)
HIT_RATIO = "sidestep_kv_whatif_hit_ratio"
MISSED = "sidestep_kv_missed_tokens"


@dataclasses.dataclass(frozen=True)
class Cache:
    """An engine's own counters of tokens that were looked up and found."""

    looked_up: str
    found: str

    def missing(self, page: Page) -> float:
        """Return the tokens that were not found."""
        return value(page, self.looked_up) - value(page, self.found)

    def hit_ratio(self, page: Page) -> float:
        """Return the share of tokens that were found."""
        return value(page, self.found) / value(page, self.looked_up)

    async def settled(self, server: Server, exporter: ExporterProcess) -> Page:
        """Return the exporter's page once it has all lookups of the engine's own."""
        queries = value(parse(await server.page()), self.looked_up)
        return await settled_alone(exporter, lambda page: value(page, self.looked_up) == queries)

    async def serve(self, server: Server, exporter: ExporterProcess, requests: int) -> Page:
        """Ask for conversations; return the exporter's page, with gauges of after their end."""
        async with Client(server.base) as client:
            answers = await ask_in_turns(client, conversations(requests, 7))
        await self.settled(server, exporter)
        # The gauges are those of the last update.
        await asyncio.sleep(INTERVAL + 1.0)
        page = await self.settled(server, exporter)
        report("served", page, answers)
        return page

    def check(self, pages: Mapping[float, Page], within: float) -> None:
        """Assert that each size has the hit ratio that the run of size 1 has predicted for it."""
        page = pages[1.0]
        measured = {size: self.hit_ratio(found) for size, found in pages.items()}
        predicted = {size: value(page, HIT_RATIO, capacity=f"{size:g}x") for size in pages}
        missed = missed_tokens(page)
        for name, ratios in (("predicted", predicted), ("measured", measured)):
            report(name, page, [], **{f"{size:g}x": ratio for size, ratio in ratios.items()})

        assert_nothing_refused(page)
        assert all(abs(predicted[size] - measured[size]) <= within for size in pages)
        assert measured[max(pages)] - measured[min(pages)] > 5 * within
        assert abs(sum(missed.values()) - self.missing(page)) < 0.1 * self.missing(page)
        assert missed["unknown"] == missed["cleared"] == missed["not_cacheable"] == 0.0


def missed_tokens(page: Page) -> dict[str, float]:
    """Return the missed tokens by reason."""
    return {reason: value(page, MISSED, reason=reason) for reason in REASONS}


pytestmark = pytest.mark.engine


class Engine(NamedTuple):
    """Counters of an engine's cache, flags that set its size, and the load whose curve is read."""

    cache: Cache
    sized: Callable[[float], list[str]]
    requests: int
    within: float


VLLM = Engine(
    Cache("vllm:prefix_cache_queries", "vllm:prefix_cache_hits"),
    lambda size: [
        "--num-gpu-blocks-override", str(int(800 * size) + 1),
        "--max-num-seqs", "8", "--max-num-batched-tokens", "2048", *TAP,
    ],
    2500,
    0.02,
)  # fmt: skip
SGLANG = Engine(
    Cache("sglang:prompt_tokens", "sglang:cached_tokens"),
    lambda size: ["--max-total-tokens", str(int(25_600 * size))],
    2000,
    0.03,
)
ENGINES = {"vllm": VLLM, "sglang": SGLANG}


async def test_the_curve_of_one_size_predicts_the_others(site: Site) -> None:
    """Each size has the hit ratio that the run with the cache of size 1 has predicted for it."""
    engine = ENGINES[site.name]
    pages = {}
    for size in SIZES:
        server = site.server(engine.sized(size))
        async with site.with_exporter(server, "--kv.sample-rate", "0.25") as exporter:
            pages[size] = await engine.cache.serve(server, exporter, engine.requests)
    engine.cache.check(pages, engine.within)


async def test_every_token_that_vllm_missed_has_one_reason(vllm: VllmSite) -> None:
    """With all blocks sampled, the reasons add up to the engine's own misses, whatever happens to requests."""
    server = vllm.server([*MAIN_FLAGS, *TAP], {**MAIN_ENVIRON, "VLLM_SERVER_DEV_MODE": "1"})
    async with vllm.with_exporter(server, "--kv.sample-rate", "1") as exporter:
        async with Client(server.base) as client:
            answers = await client.mixed()
            prompts = [*conversations(30, 3)]
            answers += [await client.ask(Ask(prompt, 2)) for prompt in prompts]
            await post(f"{server.base}/reset_prefix_cache")
            uncounted = Ask(prompts[-1], 2, stream=False, options={"prompt_logprobs": 1})
            answers.append(await client.ask(uncounted))
            answers += [await client.ask(Ask(prompt, 2)) for prompt in prompts]
        page = await VLLM.cache.settled(server, exporter)
        missed = missed_tokens(page)
        report("reasons", page, answers, **missed)

    assert value(page, "vllm:num_preemptions") > 0
    assert missed.pop("not_cacheable") == answers[-len(prompts) - 1].prompt_tokens
    assert sum(missed.values()) == VLLM.cache.missing(page)
    assert min(missed[reason] for reason in ("cold", "evicted", "cleared", "too_short")) > 0
    assert missed["unknown"] == 0


async def test_every_token_that_sglang_missed_has_one_reason(sglang: SglangSite) -> None:
    """With all blocks sampled, the reasons add up to what SGLang did not find, to a part of a block a request."""
    server = sglang.server(["--max-total-tokens", "4000"])
    async with sglang.with_exporter(server, "--kv.sample-rate", "1") as exporter:
        async with Client(server.base) as client:
            prompts = [*conversations(30, 3)]
            asks = [Ask(prompt, 150) for prompt in prompts[:12]]
            left = [Ask(client.text(200), 300, leave=3) for _ in range(4)]
            answers = await client.ask_all([*asks, *left])
            answers += [await client.ask(Ask(prompt, 2)) for prompt in prompts]
            await post(f"{server.base}/flush_cache")
            answers += [await client.ask(Ask(prompt, 2)) for prompt in prompts]
        page = await SGLANG.cache.settled(server, exporter)
        missed = missed_tokens(page)
        report("reasons", page, answers, **missed)

    assert value(page, "sidestep_rejected") == 0
    assert abs(sum(missed.values()) - SGLANG.cache.missing(page)) < 0.03 * SGLANG.cache.missing(
        page
    )
    assert min(missed[reason] for reason in ("cold", "evicted", "cleared", "too_short")) > 0
    assert missed["unknown"] == missed["not_cacheable"] == 0
