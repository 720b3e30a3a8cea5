"""Lookups in a real vLLM's prefix cache: the hit ratio of other sizes, and the reasons of misses."""

from __future__ import annotations

import pytest

from real_engines.comparison import Page, report, value
from real_engines.conversations import conversations
from real_engines.curves import SIZES, Cache, missed_tokens
from real_engines.load import MAIN_ENVIRON, MAIN_FLAGS, Ask, Client
from real_engines.sglang_requests import post
from real_engines.sites import TAP, VllmSite

pytestmark = pytest.mark.engine

CACHE = Cache("vllm:prefix_cache_queries", "vllm:prefix_cache_hits")
BLOCKS = 800
"""Blocks of 32 tokens in the cache whose curve is read."""
REQUESTS = 2500


async def test_the_curve_of_one_size_predicts_the_others(vllm: VllmSite) -> None:
    """Each size has the hit ratio that the run with the cache of size 1 has predicted for it."""
    CACHE.check({size: await _run(vllm, size) for size in SIZES}, within=0.02)


async def test_every_missed_token_has_one_reason(vllm: VllmSite) -> None:
    """With all blocks sampled, the reasons add up to the engine's own misses, whatever happens to requests."""
    server = vllm.server([*MAIN_FLAGS, *TAP], {**MAIN_ENVIRON, "VLLM_SERVER_DEV_MODE": "1"})
    async with vllm.with_exporter(server, "--kv.sample-rate", "1") as exporter:
        async with Client(server.base) as client:
            answers = await client.mixed()
            prompts = [*conversations(30, 3)]
            for prompt in prompts:
                answers.append(await client.ask(Ask(prompt, 2)))
            await post(f"{server.base}/reset_prefix_cache")
            uncounted = Ask(prompts[-1], 2, stream=False, options={"prompt_logprobs": 1})
            answers.append(await client.ask(uncounted))
            answers += [await client.ask(Ask(prompt, 2)) for prompt in prompts]
        page = await CACHE.settled(server, exporter)
        missed = missed_tokens(page)
        report("reasons", page, answers, **missed)

    assert value(page, "vllm:num_preemptions") > 0
    assert missed.pop("not_cacheable") == answers[-len(prompts) - 1].prompt_tokens
    assert sum(missed.values()) == CACHE.missing(page)
    assert min(missed[reason] for reason in ("cold", "evicted", "cleared", "too_short")) > 0
    assert missed["unknown"] == 0


async def _run(vllm: VllmSite, size: float) -> Page:
    """Serve the load with a cache of ``size``, and return the exporter's page."""
    flags = [
        "--num-gpu-blocks-override", str(int(BLOCKS * size) + 1),
        "--max-num-seqs", "8", "--max-num-batched-tokens", "2048",
    ]  # fmt: skip
    server = vllm.server([*flags, *TAP])
    async with vllm.with_exporter(server, "--kv.sample-rate", "0.25") as exporter:
        return await CACHE.serve(server, exporter, REQUESTS)
