"""Records of a real vLLM's requests: one for each request of its clients, with their own numbers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from exporters import until
from real_engines.comparison import idle, parse, settled_alone, value
from real_engines.load import MAIN_ENVIRON, MAIN_FLAGS, Answer, Client, generated, reasons
from real_engines.sites import TAP, VllmSite

pytestmark = pytest.mark.engine

IDENTITY = {"SIDESTEP_REQUEST_IDENTITY": "full"}


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the records."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def ends(records: list[dict[str, Any]]) -> Counter[str]:
    """Count records by reason."""
    return Counter(record["reason"] for record in records)


@pytest.mark.parametrize("leave", [False, True])
async def test_records_equal_the_clients_own_books(
    leave: bool, vllm: VllmSite, tmp_path: Path
) -> None:
    """Parallel samples one by one, aborts included; prompt and output tokens as in ``usage``."""
    log = tmp_path / "requests.jsonl"
    server = vllm.server([*MAIN_FLAGS, *TAP], {**MAIN_ENVIRON, **IDENTITY})
    async with vllm.with_exporter(server, "--requests.log", str(log)) as exporter:
        async with Client(server.base) as client:
            answers = await client.mixed(leave=leave, stop_strings=False)
        await settled_alone(exporter, idle)

        async def is_complete() -> bool:
            page = parse(await exporter.page())
            return len(lines(log)) == value(page, "vllm:request_success")

        await until(is_complete, 30.0, "a record for each request that ended")
    records = lines(log)
    served = [record for record in records if record["reason"] != "abort"]
    completed = [answer for answer in answers if not answer.refused and not answer.left]
    assert ends(served) == reasons(completed)
    assert sum(record["output_tokens"] for record in served) == generated(completed)
    assert _prompt_tokens(served) == sum(answer.prompt_tokens for answer in completed)
    assert all(record["id"].startswith("cmpl-") for record in records)
    assert len({record["key"] for record in records}) == len(records)
    left = [answer for answer in answers if answer.left]
    aborted = [record for record in records if record["reason"] == "abort"]
    # A client that leaves may do so after the engine's last token.
    assert len(aborted) <= len(left)
    assert bool(aborted) is leave
    assert all(record["output_tokens"] > 0 for record in aborted)
    assert any(record["preemptions"] for record in records)
    _assert_plausible(served, completed)


def _prompt_tokens(records: list[dict[str, Any]]) -> int:
    """Return the prompt tokens of requests, each once for all of its samples."""
    return sum(record["prompt_tokens"] for record in records if record["sample"] == 0)


def _assert_plausible(records: list[dict[str, Any]], answers: list[Answer]) -> None:
    longest = max(answer.seconds for answer in answers)
    for record in records:
        parts = record["queue_seconds"] + record["prefill_seconds"] + record["decode_seconds"]
        assert parts <= record["e2e_seconds"] + 0.01 <= longest + 0.5
        assert 0 < record["ttft_seconds"] <= record["e2e_seconds"] + 0.001
