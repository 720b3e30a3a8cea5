"""Two real vLLM servers, one for prefill and one for decode, are one service in counts and costs."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from exporters import until
from real_engines.comparison import Page, parse, value
from real_engines.comparison import count as observed
from real_engines.comparison import total as summed
from real_engines.pd_proxy import Books, ask, proxy
from real_engines.processes import ExporterProcess
from real_engines.sites import TAP, VllmSite

pytestmark = pytest.mark.engine

INPUT, OUTPUT = 0.25, 0.5
"""Prices of a token, whose sums are exact."""
PRICES = f"*,input={INPUT * 1e6:.0f},output={OUTPUT * 1e6:.0f}"
TTFT = "sidestep_service_time_to_first_token_seconds"
BOTH_SIDES = {
    "SIDESTEP_REQUEST_IDENTITY": "full",
    "PYTHONPATH": str(Path(__file__).parent),
}
FLAGS = ("--tenants.by", "id-prefix", "--prices.model", PRICES)


def words(random_: random.Random) -> str:
    """Return a prompt of some blocks, which no other prompt begins with; now and then of less than one."""
    return " ".join(str(random_.random()) for _ in range(random_.choice([1, 6, 12])))


async def load(base: str, books: Books, start: int, count: int, tokens: int = 8) -> None:
    """Send requests of two tenants, some at a time, for ``tokens`` or a few more."""
    random_ = random.Random(start)
    async with aiohttp.ClientSession() as session:
        for begin in range(start, start + count, 4):
            await asyncio.gather(*(
                ask(session, base, f"tenant{number % 2}-{number}", books, (words(random_), tokens + number % 5))
                for number in range(begin, min(begin + 4, start + count))
            ))  # fmt: skip


def booked(pages: Sequence[Page]) -> tuple[float, ...]:
    """Return the service's requests, tokens and cost over all exporters, as counted and by tenant."""

    def over_all(family: str) -> float:
        return sum(value(page, family) for page in pages)

    service, tenant = "sidestep_service_", "sidestep_tenant_"
    return (
        over_all(f"{service}requests"),
        over_all(f"{service}prompt_tokens"),
        over_all(f"{service}generation_tokens"),
        over_all("sidestep_cost"),
        over_all(f"{tenant}requests"),
        over_all(f"{tenant}prompt_tokens") + over_all(f"{tenant}cached_prompt_tokens"),
        over_all(f"{tenant}generation_tokens"),
        over_all(f"{tenant}cost"),
    )


async def settled(exporters: Sequence[ExporterProcess], books: Books) -> list[Page]:
    """Return the exporters' pages once they have what is in the books."""
    tokens = books.prompt_tokens, books.generation_tokens
    cost = INPUT * tokens[0] + OUTPUT * tokens[1]
    expected = (books.requests, *tokens, cost) * 2
    pages: list[Page] = []

    async def agree() -> bool:
        pages[:] = [parse(await each.page()) for each in exporters]
        return booked(pages) == expected

    try:
        await until(agree, 60.0)
    except AssertionError:
        raise AssertionError(f"books {expected}, pages {booked(pages)}") from None
    return pages


def transfer(connector: str, role: str, **extra: Any) -> list[str]:
    """Return vLLM's flags for a connector."""
    config = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}
    if connector == "HandOverConnector":
        config["kv_connector_module_path"] = "vllm_hand_over_connector"
    return ["--kv-transfer-config", json.dumps(config)]


def why(request: str, *exporters: ExporterProcess) -> str:
    """Return what ``sidestep why`` says of a request."""
    command = [sys.executable, "-m", "sidestep", "why", "--request", request]
    command += [each.url.removesuffix("/metrics") for each in exporters]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_service_counts_are_the_clients_books(vllm: VllmSite) -> None:
    """Each engine has an exporter of its own, which is killed; all counts stay those of the clients.

    Both engines have the role ``both``, as is usual with NIXL: requests say what they are.
    """
    books = Books()
    endpoints = [f"ipc://{vllm.home}/{name}.ipc" for name in "pd"]

    def exporter(side: int) -> ExporterProcess:
        state = vllm.home / f"state{side}"
        flags = ("--state.dir", str(state), *FLAGS)
        return ExporterProcess(endpoints[side], vllm.home / f"exporter{side}.log", *flags)

    def server(side: int) -> Any:
        flags = [*TAP, *transfer("HandOverConnector", "kv_both", folder=str(vllm.home))]
        return vllm.server(flags, {**BOTH_SIDES, "SIDESTEP_ENDPOINT": endpoints[side]})

    exporters = [await exporter(side).started() for side in range(2)]
    try:
        async with server(0) as prefill, server(1) as decode:
            await prefill.started()
            await decode.started()
            async with proxy(prefill.base, decode.base) as base:
                await load(base, books, 0, 24)
                await settled(exporters, books)
                for side in range(2):
                    await exporters[side].stop(signal.SIGKILL)
                    running = asyncio.create_task(load(base, books, 100 * (side + 1), 16))
                    exporters[side] = await exporter(side).started()
                    await running
                    await settled(exporters, books)
                pages = await settled(exporters, books)
                told = why("cmpl-tenant0-204-0", *exporters)
    finally:
        for each in exporters:
            each.kill()

    handed_over = [value(page, "sidestep_handed_over_requests") for page in pages]
    assert handed_over == [books.requests, 0]
    # Engines' own names stay the engine's.
    assert value(pages[0], "vllm:request_success") == books.requests
    assert value(pages[1], "vllm:request_success") == books.requests
    received = [value(page, "sidestep_received_prompt_tokens") for page in pages]
    assert received == [0, books.prompt_tokens]
    transferred = value(pages[1], "sidestep_received_prompt_tokens", source="external_kv_transfer")
    assert 0 < transferred == value(pages[1], "sidestep_tenant_transferred_prompt_tokens")
    transfers = observed(pages[1], "vllm:nixl_xfer_time_seconds")
    assert summed(pages[1], "vllm:nixl_bytes_transferred") == 4096 * transfers > 0
    waited = value(pages[1], "sidestep_request_part_seconds", part="transfer")
    assert 0.2 * transfers <= waited < 20 * transfers
    assert value(pages[0], "sidestep_kv_held_requests") < books.requests
    assert [value(page, "sidestep_engine_info", role="both") for page in pages] == [1, 1]
    assert "over both engines: prefill_remote" in told
    assert "length, handed over)" in told
    assert "length, received)" in told


@pytest.mark.parametrize("prefill_mode", ["instead", "beside"])
async def test_one_exporter_for_both_roles(vllm: VllmSite, prefill_mode: str) -> None:
    """The exporter joins both parts of a request, and counts it at the engine that generates."""
    books = Books()
    log = vllm.home / "requests.jsonl"
    folder = vllm.home / "kv"
    folder.mkdir()

    def server(role: str, mode: str) -> Any:
        environ = {**BOTH_SIDES, "SIDESTEP_VLLM_MODE": mode, "SIDESTEP_NAMESPACE": role}
        return vllm.server(
            transfer("ExampleConnector", role, shared_storage_path=str(folder)), environ
        )

    async with vllm.exporter("--requests.log", str(log), *FLAGS) as exporter:
        await exporter.started()
        async with (
            server("kv_producer", prefill_mode) as prefill,
            server("kv_consumer", "instead") as decode,
        ):
            await prefill.started()
            await decode.started()
            async with proxy(prefill.base, decode.base) as base:
                # So long that the prefill engine's end comes before the decode engine's.
                await load(base, books, 0, 24, 150)
                (page,) = await settled([exporter], books)

    records = [json.loads(line) for line in log.read_text().splitlines()]
    sides = {
        part: [each for each in records if each["transfer"] == part]
        for part in ("handed_over", "received")
    }
    expected = {
        "handed_over": books.requests * (prefill_mode == "instead"),
        "received": books.requests,
    }
    assert {part: len(found) for part, found in sides.items()} == expected
    roles = {part: {each["role"] for each in found} for part, found in sides.items() if found}
    assert roles.pop("received") == {"decode"}
    assert all(found == {"prefill"} for found in roles.values())
    joined = [each["parts"].get("prefill_remote", 0.0) for each in sides["received"]]
    assert all(joined) == (prefill_mode == "instead")
    e2e = sum(each["e2e_seconds"] for each in sides["received"])
    assert summed(page, "sidestep_service_e2e_request_latency_seconds") == pytest.approx(
        e2e + sum(joined), abs=1e-3
    )
    assert observed(page, TTFT) == books.requests
    assert value(page, "sidestep_engine_info", role="prefill", connectors="ExampleConnector") == 1
