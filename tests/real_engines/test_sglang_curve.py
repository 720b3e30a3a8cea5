"""The hit ratio of a real SGLang's radix cache with other sizes, predicted from one run and measured in others."""

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
from real_engines.load import Ask, Client
from real_engines.sglang_requests import post
from real_engines.sites import SglangSite
from sidestep.metrics.kv_curves import INTERVAL
from sidestep.tracking.kv_blocks.lookups import REASONS

pytestmark = pytest.mark.engine

TOKENS = 25_600
"""Tokens in the cache whose curve is read."""
SIZES = (0.5, 1.0, 2.0, 4.0)
REQUESTS = 2000
WITHIN = 0.03
"""Difference between the predicted and the measured hit ratio."""
HIT_RATIO = "sidestep_kv_whatif_hit_ratio"
MISSED = "sidestep_kv_missed_tokens"


async def test_the_curve_of_one_size_predicts_the_others(sglang: SglangSite) -> None:
    """Each size has the hit ratio that the run with the cache of size 1 has predicted for it."""
    pages = {size: await _run(sglang, size) for size in SIZES}
    measured = {size: _found(page) / _looked_up(page) for size, page in pages.items()}
    page = pages[1.0]
    predicted = {size: value(page, HIT_RATIO, capacity=f"{size:g}x") for size in SIZES}
    missed = {reason: value(page, MISSED, reason=reason) for reason in REASONS}
    missing = _looked_up(page) - _found(page)
    report("predicted", page, [], **{f"{size:g}x": predicted[size] for size in SIZES}, **missed)
    report("measured", page, [], **{f"{size:g}x": measured[size] for size in SIZES})

    assert_nothing_refused(page)
    assert all(abs(predicted[size] - measured[size]) <= WITHIN for size in SIZES)
    assert measured[4.0] - measured[0.5] > 5 * WITHIN
    assert abs(sum(missed.values()) - missing) < 0.1 * missing
    assert missed["unknown"] == missed["cleared"] == missed["not_cacheable"] == 0.0


async def test_every_missed_token_has_one_reason(sglang: SglangSite) -> None:
    """With all blocks sampled, the reasons add up to what SGLang did not find, to a part of a block a request."""
    async with (
        sglang.with_exporter(
            server := sglang.server(["--max-total-tokens", "4000"]), "--kv.sample-rate", "1"
        ) as exporter,
        Client(server.base) as client,
    ):
        prompts = [*conversations(30, 3)]
        asks = [Ask(prompt, 150) for prompt in prompts[:12]]
        answers = await client.ask_all(
            [*asks, *(Ask(client.text(200), 300, leave=3) for _ in range(4))]
        )
        for prompt in prompts:
            answers.append(await client.ask(Ask(prompt, 2)))
        await post(f"{server.base}/flush_cache")
        answers += [await client.ask(Ask(prompt, 2)) for prompt in prompts]
        queries = _looked_up(parse(await server.page()))
        page = await settled_alone(exporter, lambda page: _looked_up(page) == queries)
        missed = {reason: value(page, MISSED, reason=reason) for reason in REASONS}
        report("reasons", page, answers, **missed, found=_found(page), looked_up=_looked_up(page))

    missing = _looked_up(page) - _found(page)
    assert abs(sum(missed.values()) - missing) < 0.03 * missing
    assert min(missed[reason] for reason in ("cold", "evicted", "cleared", "too_short")) > 0
    assert missed["unknown"] == missed["not_cacheable"] == 0


def _looked_up(page: Page) -> float:
    return value(page, "sglang:prompt_tokens")


def _found(page: Page) -> float:
    return value(page, "sglang:cached_tokens")


async def _run(sglang: SglangSite, size: float) -> Page:
    """Serve the load with a cache of ``size``, and return the exporter's page."""
    server = sglang.server(["--max-total-tokens", str(int(TOKENS * size))])
    async with sglang.with_exporter(server, "--kv.sample-rate", "0.25") as exporter:
        async with Client(server.base) as client:
            answers = await ask_in_turns(client, [*conversations(REQUESTS, 7)])
        queries = _looked_up(parse(await server.page()))

        def is_complete(page: Page) -> bool:
            return _looked_up(page) == queries

        await settled_alone(exporter, is_complete)
        # The gauges are those of the last update.
        await asyncio.sleep(INTERVAL + 1.0)
        ours = await settled_alone(exporter, is_complete)
        report(f"cache of {size:g}x", ours, answers)
        return ours
