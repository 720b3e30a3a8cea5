"""A real SGLang server for decode, which receives no KV: on a CPU only its fake backend runs.

Its server for prefill has no such backend; ``tests/engines/test_hand_overs.py`` has its requests, from its sources.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from exporters import until
from real_engines.comparison import parse, value
from real_engines.sites import SglangSite

pytestmark = pytest.mark.engine

FLAGS = shlex.split("--disaggregation-mode decode --disaggregation-transfer-backend fake")
PRICES = "*,input=1000000,output=500000,transferred=250000"


async def test_a_decode_engine_counts_no_prompts(sglang: SglangSite, tmp_path: Path) -> None:
    """Requests, generated tokens and their cost are the clients'; prompts have the price of a transfer."""
    log = tmp_path / "requests.jsonl"
    flags = ["--requests.log", str(log), "--tenants.by", "id-prefix", "--prices.model", PRICES]
    environ = {"SIDESTEP_REQUEST_IDENTITY": "full"}
    usages: list[dict[str, Any]] = []

    async def generate(session: aiohttp.ClientSession, base: str, number: int) -> None:
        body = {
            "rid": f"acme-{number}",
            "text": "word " * (10 + number),
            "sampling_params": {"max_new_tokens": 6 + number, "ignore_eos": True},
            "bootstrap_host": "10.0.0.1",
            "bootstrap_room": 70 + number,
        }
        async with session.post(f"{base}/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            usages.append((await answer.json())["meta_info"])

    server = sglang.server(FLAGS, environ)
    async with sglang.with_exporter(server, *flags) as exporter:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(generate(session, server.base, number) for number in range(6)))
        prompt = sum(usage["prompt_tokens"] for usage in usages)
        generated = sum(usage["completion_tokens"] for usage in usages)
        # A server's own warm-up is among its requests, in any other tenant.
        expected = {
            "sidestep_tenant_requests": 6,
            "sidestep_tenant_prompt_tokens": 0,
            "sidestep_tenant_transferred_prompt_tokens": prompt,
            "sidestep_tenant_generation_tokens": generated,
            "sidestep_tenant_cost": prompt / 4 + generated / 2,
        }
        found: dict[str, float] = {}

        async def agree() -> bool:
            page = parse(await exporter.page())
            found.update({name: value(page, name, tenant="acme") for name in expected})
            return found == expected

        await until(agree, 60.0)
        page = parse(await exporter.page())

    assert value(page, "sidestep_service_prompt_tokens") == 0
    assert value(page, "sidestep_engine_info", role="decode") >= 2
    records = [json.loads(line) for line in log.read_text().splitlines()]
    mine = [record for record in records if record["id"].startswith("acme-")]
    assert {record["transfer"] for record in mine} == {"received"}
    assert {record["join_key"] for record in mine} == {f"10.0.0.1/{70 + n}" for n in range(6)}
    for record in mine:
        assert sum(record["parts"].values()) == pytest.approx(record["e2e_seconds"], abs=1e-5)
        assert record["parts"]["prefill_remote"] > 0
