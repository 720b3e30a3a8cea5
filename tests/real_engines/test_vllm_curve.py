"""The hit ratio of prefix caches of other sizes, predicted from one run and measured in others."""

from __future__ import annotations

import asyncio

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
from real_engines.sglang_requests import post
from real_engines.sites import TAP, VllmSite
from sidestep.metrics.kv_curves import INTERVAL
from sidestep.tracking.kv_blocks.lookups import REASONS

pytestmark = pytest.mark.engine

BLOCKS = 800
"""Blocks of 32 tokens in the cache whose curve is read."""
SIZES = (0.5, 1.0, 2.0, 4.0)
REQUESTS = 2500
WITHIN = 0.02
"""Difference between the predicted and the measured hit ratio."""
HIT_RATIO = "sidestep_kv_whatif_hit_ratio"
MISSED = "sidestep_kv_missed_tokens"


async def test_the_curve_of_one_size_predicts_the_others(vllm: VllmSite) -> None:
    """Each size has the hit ratio that the run with the cache of size 1 has predicted for it."""
    pages = {size: await _run(vllm, size) for size in SIZES}
    measured = {size: _found(page) / _looked_up(page) for size, page in pages.items()}
    page = pages[1.0]
    predicted = {size: value(page, HIT_RATIO, capacity=f"{size:g}x") for size in SIZES}
    missed = {reason: value(page, MISSED, reason=reason) for reason in REASONS}
    missing = _looked_up(page) - _found(page)
    report("curve", page, [], **{f"{size:g}x": predicted[size] for size in SIZES})
    report("measured", page, [], **{f"{size:g}x": measured[size] for size in SIZES})
    assert_nothing_refused(page)
    assert all(abs(predicted[size] - measured[size]) <= WITHIN for size in SIZES)
    assert measured[4.0] - measured[0.5] > 5 * WITHIN
    assert abs(sum(missed.values()) - missing) < 0.1 * missing
    assert missed["unknown"] == missed["cleared"] == missed["not_cacheable"] == 0.0


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
        queries = _looked_up(parse(await server.page()))
        page = await settled_alone(exporter, lambda page: _looked_up(page) == queries)
        missed = {reason: value(page, MISSED, reason=reason) for reason in REASONS}
        report("reasons", page, answers, **missed)

    assert value(page, "vllm:num_preemptions") > 0
    assert missed.pop("not_cacheable") == answers[-len(prompts) - 1].prompt_tokens
    assert sum(missed.values()) == _looked_up(page) - _found(page)
    assert min(missed[reason] for reason in ("cold", "evicted", "cleared", "too_short")) > 0
    assert missed["unknown"] == 0


def _looked_up(page: Page) -> float:
    return value(page, "vllm:prefix_cache_queries")


def _found(page: Page) -> float:
    return value(page, "vllm:prefix_cache_hits")


async def _run(vllm: VllmSite, size: float) -> Page:
    """Serve the load with a cache of ``size``, and return the exporter's page."""
    flags = [
        "--num-gpu-blocks-override", str(int(BLOCKS * size) + 1),
        "--max-num-seqs", "8", "--max-num-batched-tokens", "2048",
    ]  # fmt: skip
    server = vllm.server([*flags, *TAP])
    async with vllm.with_exporter(server, "--kv.sample-rate", "0.25") as exporter:
        async with Client(server.base) as client:
            answers = await ask_in_turns(client, conversations(REQUESTS, 7))
        queries = _looked_up(parse(await server.page()))

        def is_complete(page: Page) -> bool:
            return _looked_up(page) == queries

        await settled_alone(exporter, is_complete)
        # The gauges are those of the last update.
        await asyncio.sleep(INTERVAL + 1.0)
        ours = await settled_alone(exporter, is_complete)
        report(f"cache of {size:g}x", ours, answers)
        return ours
