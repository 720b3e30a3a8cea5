"""A real SGLang: it runs on this machine, and its own page and feeds tell of a load."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from real_engines.comparison import Page, assert_complete, count, parse, value
from real_engines.load import Ask, Client, generated, reasons
from real_engines.processes import until
from real_engines.sglang_requests import post
from real_engines.sglang_server import (
    RETRACTING,
    TWO_RANKS,
    TWO_RANKS_ENVIRON,
    Feeds,
    Listener,
    SglangServer,
)

pytestmark = pytest.mark.engine

FAMILIES = {
    "sglang:cache_hit_rate": "gauge",
    "sglang:cached_tokens": "counter",
    "sglang:e2e_request_latency_seconds": "histogram",
    "sglang:evicted_tokens": "counter",
    "sglang:gen_throughput": "gauge",
    "sglang:generation_tokens": "counter",
    "sglang:inter_token_latency_seconds": "histogram",
    "sglang:kv_used_tokens": "gauge",
    "sglang:num_queue_reqs": "gauge",
    "sglang:num_requests": "counter",
    "sglang:num_retracted_requests": "counter",
    "sglang:num_running_reqs": "gauge",
    "sglang:per_stage_req_latency_seconds": "histogram",
    "sglang:prompt_tokens": "counter",
    "sglang:queue_time_seconds": "histogram",
    "sglang:realtime_tokens": "counter",
    "sglang:time_to_first_token_seconds": "histogram",
    "sglang:token_usage": "gauge",
}
"""Some of those that a load moves: each part of SGLang that counts has one here."""

UNCACHED = 9
"""Where a load's prompt tokens computed so far are."""


async def settled(server: SglangServer) -> Page:
    """The server's own page once the server is idle."""
    page = Page()

    async def idle() -> bool:
        nonlocal page
        page = parse(await server.page())
        return not any(value(page, f"sglang:num_{state}_reqs") for state in ("running", "queue"))

    await until(idle, what="an idle engine")
    return page


def resident(blocks: Listener) -> int:
    """Blocks in the cache, by a feed's account."""
    kept: set[int] = set()
    for event in (event for message in blocks.heard for event in message.payload[1]):
        match event["type"]:
            case "BlockStored":
                kept.update(event["block_hashes"])
            case "BlockRemoved":
                kept.difference_update(event["block_hashes"])
            case "AllBlocksCleared":
                kept.clear()
    return len(kept)


async def test_its_own_page_tells_of_the_load(sglang_python: Path, tiny: Path, home: Path) -> None:
    """After a mixed load, half of it streamed, the page counts what the clients were told."""
    async with SglangServer(sglang_python, tiny, home, environ=RETRACTING) as server:
        await server.started()
        before = await settled(server)
        async with Client(server.base) as client:
            answers = await client.mixed(leave=False, streams=2)
        page = await settled(server)
        code = await server.stop()
        left = server.alive()

    assert {name: page[name].kind for name in FAMILIES if name in page} == FAMILIES
    assert [400] == [answer.status for answer in answers if answer.status != 200]
    assert_complete([answer for answer in answers if answer.status == 200])
    assert {"length": 56, "stop": 12} == reasons(answers)

    def moved(family: str, **labels: str) -> float:
        return value(page, family, **labels) - value(before, family, **labels)

    assert generated(answers) == moved("sglang:generation_tokens")
    # Of a request with two samples SGLang counts the prompt's own run as a third.
    assert 66 + 2 * 2 == moved("sglang:num_requests")
    for streaming in ("true", "false"):
        assert moved("sglang:num_requests", is_streaming=streaming) > 0
    assert moved("sglang:num_retracted_requests") > 0
    assert moved("sglang:evicted_tokens") > 0
    assert count(page, "sglang:inter_token_latency_seconds") > 0
    assert (code, left) == (0, [])


async def test_two_ranks_and_their_feeds(sglang_python: Path, tiny: Path, home: Path) -> None:
    """Each rank publishes its forward passes, its load and its blocks, as the page counts them."""
    feeds = Feeds.chosen(home, ranks=2)
    flags = [*TWO_RANKS, *feeds.flags]
    server = SglangServer(sglang_python, tiny, home, flags, TWO_RANKS_ENVIRON)
    async with server, contextlib.AsyncExitStack() as stack:
        await server.started()

        async def listen(endpoint: str) -> Listener:
            return await stack.enter_async_context(Listener(endpoint))

        forwards = [await listen(feeds.forward_pass(rank)) for rank in range(2)]
        loads = [await listen(feeds.load(rank)) for rank in range(2)]
        blocks = [await listen(feeds.kv_events(rank)) for rank in range(2)]
        # Forward passes and loads tell something every second, though nothing runs; blocks, when
        # they change: they all go, and with them those that were stored before anyone listened.
        every = [*forwards, *loads, *blocks]

        async def all_tell() -> bool:
            await post(f"{server.base}/flush_cache")
            return all(feed.heard for feed in every)

        await until(all_tell, what="a message of every feed")
        before = await settled(server)
        async with Client(server.base) as client:
            asks = [Ask(client.text(60), 24, stream=turn % 2 == 0) for turn in range(20)]
            answers = await client.ask_all(asks)
        page = await settled(server)

        def counted(family: str, rank: int, **labels: str) -> float:
            where = {"dp_rank": str(rank), **labels}
            return value(page, family, **where) - value(before, family, **where)

        def by_the_page(rank: int) -> dict[str, float]:
            tokens = "sglang:realtime_tokens"
            return {
                "computed": counted(tokens, rank, mode="prefill_compute"),
                "cached": counted(tokens, rank, mode="prefill_cache"),
                "decoded": counted(tokens, rank, mode="decode"),
                "uncached": counted(tokens, rank, mode="prefill_compute"),
                "blocks": value(page, "sglang:kv_evictable_tokens", dp_rank=str(rank)),
            }

        def by_the_feeds(rank: int) -> dict[str, float]:
            passes = [message.payload["scheduled_requests"] for message in forwards[rank].heard]
            first, last = (loads[rank].heard[turn].payload for turn in (0, -1))
            return {
                "computed": sum(one["sum_prefill_tokens"] for one in passes),
                "cached": sum(one["sum_prefill_kv_tokens"] for one in passes),
                "decoded": sum(one["num_decode_requests"] for one in passes),
                "uncached": last[UNCACHED] - first[UNCACHED],
                "blocks": resident(blocks[rank]),
            }

        theirs = [by_the_page(rank) for rank in range(2)]
        with contextlib.suppress(AssertionError):
            await until(lambda: theirs == [by_the_feeds(rank) for rank in range(2)], 10)
        heard = [by_the_feeds(rank) for rank in range(2)]
        code = await server.stop()
        left = server.alive()

    assert_complete(answers)
    assert theirs == heard
    for rank in range(2):
        assert theirs[rank]["computed"] > 0
        assert theirs[rank]["decoded"] > 0
    for feed in every:
        numbers = [message.number for message in feed.heard]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert (code, left) == (0, [])
