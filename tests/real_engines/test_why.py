"""``sidestep why`` of real engines, of which one limit is forced."""

from __future__ import annotations

import asyncio
import json
import shlex

import pytest

from command_line import sidestep
from real_engines.comparison import settled_alone, value
from real_engines.load import Ask, Client
from real_engines.processes import Server
from real_engines.sites import TAP, SglangSite, Site, VllmSite

pytestmark = pytest.mark.engine

REQUESTS = 24


async def cause(site: Site, server: Server, prompt: int, tokens: int) -> list[str]:
    """Return the causes that ``why`` names after requests that all arrive at once."""
    async with site.with_exporter(server) as exporter:
        async with Client(server.base) as client:
            asks = [Ask(client.text(prompt), tokens) for _ in range(REQUESTS)]
            await client.ask_all(asks)
        await settled_alone(exporter, lambda page: value(page, site.finished) >= REQUESTS)
        # A scheduler of SGLang's is read once a second.
        await asyncio.sleep(3.0)
        url = exporter.url.removesuffix("/metrics")
        done = await asyncio.to_thread(sidestep, "why", url, "--json")
        print((await asyncio.to_thread(sidestep, "why", url)).stdout)  # noqa: T201
    assert done.returncode == 0, done.stderr
    (named, *_) = json.loads(done.stdout)["engines"]
    return [each["cause"] for each in named["causes"]]


@pytest.mark.parametrize(
    ("limit", "flags", "prompt", "tokens"),
    [
        ("slots", "--max-num-seqs 2", 30, 60),
        ("kv_blocks", "--num-gpu-blocks-override 24 --max-model-len 512", 200, 120),
    ],
)
async def test_why_names_vllms_limit(
    limit: str, flags: str, prompt: int, tokens: int, vllm: VllmSite
) -> None:
    """It is the largest cause."""
    found = await cause(vllm, vllm.server([*shlex.split(flags), *TAP]), prompt, tokens)

    assert found[0] == limit


async def test_why_names_sglangs_limit(sglang: SglangSite) -> None:
    """Its tokenizer's requests wait for what its scheduler counts."""
    found = await cause(sglang, sglang.server(["--max-running-requests", "2"]), 30, 60)

    assert found[0] == "slots"
