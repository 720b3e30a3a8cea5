"""Runs of simulated requests, as lines of the request log."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec

from sidestep.requests.record import RequestRecord

BEGIN = datetime(2026, 11, 20, 10, tzinfo=timezone.utc)
UNKNOWN: dict[str, Any] = {
    "engine": "0", "dialect": "vllm", "model": "m", "adapter": "", "id": "", "trace_id": "",
    "parent_span_id": "", "tenant": "", "priority": 0, "sample": 0, "refused": "",
    "queue_seconds": None, "prefill_seconds": None, "decode_seconds": None,
    "preempted_seconds": 0.0, "preemptions": 0, "max_itl_seconds": None, "cached_tokens": 0,
    "external_tokens": 0, "extra_tokens": 0, "max_tokens": None, "objectives": {},
}  # fmt: skip


def run(
    seed: int,
    count: int = 400,
    *,
    slower: float = 1.0,
    longer: float = 1.0,
    rate: float = 10.0,
    queue: float = 0.0,
    **fields: Any,
) -> list[RequestRecord]:
    """Return requests that arrive at random and do not wait for one another, unless there is a queue.

    Args:
        seed: Seed of all random numbers.
        count: Number of requests.
        slower: Factor of all latencies.
        longer: Factor of the lengths of prompts.
        rate: Requests a second.
        queue: Mean seconds for which a request occupies the one server of a queue.
        fields: Further fields of all records.
    """
    numbers = random.Random(seed)
    arrival, free_at = 0.0, 0.0
    made = []
    for number in range(count):
        arrival += numbers.expovariate(rate)
        prompt = 1 + int(longer * numbers.lognormvariate(6.0, 0.6))
        output = 2 + int(numbers.lognormvariate(4.0, 0.6))
        ttft = slower * (0.02 + prompt * 1e-4) * numbers.lognormvariate(0.0, 0.3)
        if queue:
            free_at = max(free_at, arrival) + slower * numbers.expovariate(1 / queue)
            ttft += free_at - arrival
        itl = slower * 0.01 * numbers.lognormvariate(0.0, 0.2)
        e2e = ttft + itl * (output - 1)
        times = {
            "arrival": BEGIN + timedelta(seconds=arrival),
            "time": BEGIN + timedelta(seconds=arrival + e2e),
        }
        own = {
            "key": f"e/{seed}/{number}", "reason": "stop", "e2e_seconds": e2e, "ttft_seconds": ttft,
            "mean_itl_seconds": itl, "prompt_tokens": prompt, "output_tokens": output, **times,
        }  # fmt: skip
        made.append(RequestRecord(**{**UNKNOWN, **own, **fields}))
    return made


def write(path: Path, records: Sequence[RequestRecord]) -> Path:
    """Write a request log, in the order in which the requests ended."""
    ordered = sorted(records, key=lambda record: record.time)
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in ordered))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a request log, of which there are none before the first."""
    return (
        [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
        if path.exists()
        else []
    )
