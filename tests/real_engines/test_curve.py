"""Lookups in a real engine's prefix cache: the hit ratio of other sizes, and the reasons of misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from real_engines.comparison import report, value
from real_engines.conversations import conversations
from real_engines.curves import SIZES, Cache, missed_tokens
from real_engines.load import MAIN_ENVIRON, MAIN_FLAGS, Ask, Client
from real_engines.sglang_requests import post
from real_engines.sites import TAP, SglangSite, Site, VllmSite

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
