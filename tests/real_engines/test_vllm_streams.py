"""A real vLLM's KV events, with no code in the engine."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from exporters import until
from real_engines.comparison import (
    Page,
    assert_complete,
    assert_nothing_refused,
    count,
    parse,
    report,
    value,
)
from real_engines.conversations import ask_in_turns, conversations
from real_engines.load import Client
from real_engines.processes import ExporterProcess
from real_engines.sglang_server import Listener, free_ports
from real_engines.sites import VllmSite

pytestmark = pytest.mark.engine

BLOCKS = 500
"""Blocks of 32 tokens in the cache whose events are read, and by which the other one is larger."""
REQUESTS = 1200


def chosen() -> tuple[int, str, list[str]]:
    """Return a port for events, a subscription to them and their replays, and vLLM's flags."""
    port = free_ports(2)
    publishing = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        # At any other address vLLM connects instead of binding.
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{port + 1}",
    }
    subscription = f"kv-events=tcp://127.0.0.1:{port},replay=tcp://127.0.0.1:{port + 1},model=tiny"
    return port, subscription, ["--kv-events-config", json.dumps(publishing)]


def published(events: Listener) -> dict[str, float]:
    """Return how many blocks were stored and removed, and stored although there was an equal one."""
    found = {"BlockStored": 0.0, "BlockRemoved": 0.0, "equal": 0.0}
    copies: Counter[bytes | int] = Counter()
    for message in events.heard:
        for event in message.payload[1]:
            kind, hashes = (
                (event["type"], event.get("block_hashes", ()))
                if isinstance(event, dict)
                else (event[0], event[1] if len(event) > 1 else ())
            )
            if kind in found:
                found[kind] += len(hashes)
                found["equal"] += kind == "BlockStored" and sum(copies[one] > 0 for one in hashes)
                copies.update(dict.fromkeys(hashes, 1 if kind == "BlockStored" else -1))
    return found


async def test_blocks_are_counted_across_a_killed_exporter(vllm: VllmSite) -> None:
    """Blocks stored and removed are counted once, though half of the messages met no exporter."""
    port, subscription, publishing = chosen()
    arguments = ["--num-gpu-blocks-override", "96", *publishing]
    state = vllm.home / "state"
    state.mkdir()
    flags = ["--subscribe", subscription, "--state.dir", str(state), "--kv.sample-rate", "1"]

    async def counted(exporter: ExporterProcess, events: Listener) -> bool:
        page = parse(await exporter.page())
        family = "sidestep_kv_cache_{}_blocks"
        found = {
            "BlockStored": value(page, family.format("stored")),
            "BlockRemoved": value(page, family.format("removed")),
        }
        return found.items() <= published(events).items() and found["BlockRemoved"] > 0

    async with (
        vllm.server(arguments, sends=False) as server,
        Listener(f"tcp://127.0.0.1:{port}") as events,
    ):
        await server.started()
        async with vllm.exporter(*flags) as exporter, Client(server.base) as client:
            await exporter.started()
            answers = await client.mixed(leave=False)
            await until(lambda: counted(exporter, events), 30, "all blocks")
            exporter.kill()
            answers += await client.mixed(leave=False)
        async with vllm.exporter(*flags) as exporter:
            await exporter.started()
            await until(lambda: counted(exporter, events), 30, "all blocks, the missed ones too")
            page = parse(await exporter.page())

    assert_complete([answer for answer in answers if answer.status == 200])
    known = published(events)
    # Equal blocks, which requests compute at the same time, count once; the next exporter does not know them.
    blocks = known["BlockStored"] - known["BlockRemoved"]
    resident = value(page, "sidestep_kv_cache_resident_blocks")
    assert blocks - known["equal"] <= resident <= blocks
    report("blocks", page, [], resident=resident, **known)
    assert value(page, "sidestep_subscription_lost_messages") == 0
    assert value(page, "sidestep_subscription_replayed_messages") > 0
    assert count(page, "sidestep_kv_cached_block_lifetime_seconds", medium="GPU") > 0
    assert_nothing_refused(page)


async def test_removals_predict_the_stores_of_a_larger_cache(vllm: VllmSite) -> None:
    """A cache of twice the size stores as many blocks fewer as the events of the smaller one say."""
    smaller, larger = [await _run(vllm, size) for size in (BLOCKS, 2 * BLOCKS)]
    stored = "sidestep_kv_cache_stored_blocks"
    measured = 1 - value(larger, stored) / value(smaller, stored)
    samples = smaller["sidestep_kv_cached_shortage_blocks"].samples.items()
    (saved,) = (n for (_, labels), n in samples if dict(labels).get("le") == f"{BLOCKS:.1f}")
    predicted = saved / value(smaller, "sidestep_kv_cached_stores")
    report("stores saved", smaller, [], predicted=predicted, measured=measured)

    assert measured > 0.1
    assert abs(predicted - measured) <= 0.03


async def _run(vllm: VllmSite, blocks: int) -> Page:
    """Serve conversations with a cache of ``blocks``, and return the page once it is complete."""
    port, subscription, publishing = chosen()
    arguments = [
        "--num-gpu-blocks-override", str(blocks + 1), "--max-num-seqs", "4",
        "--max-num-batched-tokens", "2048", *publishing,
    ]  # fmt: skip
    server = vllm.server(arguments, sends=False)
    async with (
        Listener(f"tcp://127.0.0.1:{port}") as events,
        vllm.with_exporter(
            server, "--subscribe", subscription, "--kv.sample-rate", "1"
        ) as exporter,
    ):
        async with Client(server.base) as client:
            answers = await ask_in_turns(client, conversations(REQUESTS, 7))
        assert_complete(answers)

        async def complete() -> bool:
            counted = value(parse(await exporter.page()), "sidestep_kv_cache_stored_blocks")
            return counted == published(events)["BlockStored"]

        await until(complete, 30, "all blocks")
        return parse(await exporter.page())
