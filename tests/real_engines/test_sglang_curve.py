"""Lookups in a real SGLang's radix cache: the hit ratio of other sizes, and the reasons of misses."""

from __future__ import annotations

import pytest

from real_engines.comparison import Page, report, value
from real_engines.conversations import conversations
from real_engines.curves import SIZES, Cache, missed_tokens
from real_engines.load import Ask, Client
from real_engines.sglang_requests import post
from real_engines.sites import SglangSite

pytestmark = pytest.mark.engine

CACHE = Cache("sglang:prompt_tokens", "sglang:cached_tokens")
TOKENS = 25_600
"""Tokens in the cache whose curve is read."""
REQUESTS = 2000


async def test_the_curve_of_one_size_predicts_the_others(sglang: SglangSite) -> None:
    """Each size has the hit ratio that the run with the cache of size 1 has predicted for it."""
    CACHE.check({size: await _run(sglang, size) for size in SIZES}, within=0.03)


async def test_every_missed_token_has_one_reason(sglang: SglangSite) -> None:
    """With all blocks sampled, the reasons add up to what SGLang did not find, to a part of a block a request."""
    server = sglang.server(["--max-total-tokens", "4000"])
    async with sglang.with_exporter(server, "--kv.sample-rate", "1") as exporter:
        async with Client(server.base) as client:
            prompts = [*conversations(30, 3)]
            asks = [Ask(prompt, 150) for prompt in prompts[:12]]
            left = [Ask(client.text(200), 300, leave=3) for _ in range(4)]
            answers = await client.ask_all([*asks, *left])
            for prompt in prompts:
                answers.append(await client.ask(Ask(prompt, 2)))
            await post(f"{server.base}/flush_cache")
            answers += [await client.ask(Ask(prompt, 2)) for prompt in prompts]
        page = await CACHE.settled(server, exporter)
        missed = missed_tokens(page)
        report("reasons", page, answers, **missed)

    assert value(page, "sidestep_rejected") == 0
    assert abs(sum(missed.values()) - CACHE.missing(page)) < 0.03 * CACHE.missing(page)
    assert min(missed[reason] for reason in ("cold", "evicted", "cleared", "too_short")) > 0
    assert missed["unknown"] == missed["not_cacheable"] == 0


async def _run(sglang: SglangSite, size: float) -> Page:
    """Serve the load with a cache of ``size``, and return the exporter's page."""
    server = sglang.server(["--max-total-tokens", str(int(TOKENS * size))])
    async with sglang.with_exporter(server, "--kv.sample-rate", "0.25") as exporter:
        return await CACHE.serve(server, exporter, REQUESTS)
