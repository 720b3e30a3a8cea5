"""Decoding of forward-pass metrics and load records, and invalid ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.errors import WireError
from sidestep.protocol.limits import COUNT_LIMIT
from sidestep_adapters.streams import records
from sidestep_adapters.streams.records import Totals

SCHEDULED = {
    "num_prefill_requests": 1,
    "sum_prefill_tokens": 150,
    "var_prefill_length": 0.5,
    "sum_prefill_kv_tokens": 7,
    "num_decode_requests": 4,
    "sum_decode_kv_tokens": 99,
    "var_decode_kv_tokens": 2.5,
}
QUEUED = {name: n for name, n in SCHEDULED.items() if name != "sum_prefill_kv_tokens"}
RECORD: dict[str, Any] = {
    "version": 1,
    "worker_id": "w",
    "dp_rank": 3,
    "counter_id": 9,
    "wall_time": 0.25,
    "scheduled_requests": SCHEDULED,
    "queued_requests": QUEUED,
}
STAT = ["LoadStat", 1, 2, 30, 400, 5, 6, 70, 8, 1000, 2_000_000]


def encoded(value: object) -> bytes:
    """Return a record as it is in a message."""
    return msgspec.msgpack.encode(value)


@pytest.mark.parametrize("record", [RECORD, {**RECORD, "new": [1]}])
def test_a_forward_pass_is_a_map(record: object) -> None:
    """SGLang and Dynamo send the same fields; later ones are ignored."""
    item, rank = records.decode_forward_pass(encoded(record), 5.0)

    assert rank == 3
    assert item.stamp == 5.0
    assert msgspec.structs.asdict(item.scheduled) == SCHEDULED
    assert msgspec.structs.asdict(item.queued) == QUEUED
    assert item.ran is not None
    assert (item.ran.scheduled, item.ran.wall_times) == (item.scheduled, [0.25])


def test_a_heartbeat_is_no_forward_pass() -> None:
    """Without work and time only its gauges count."""
    heartbeat = encoded({"wall_time": 0.0, "scheduled_requests": {}})
    idle, rank = records.decode_forward_pass(heartbeat, 0.0)
    unknown, _ = records.decode_forward_pass(encoded({**RECORD, "wall_time": 0.0}), 0.0)

    assert idle.ran is None
    assert rank is None
    assert unknown.ran is not None
    assert unknown.ran.wall_times == []


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({**RECORD, "version": 2}, "version"),
        ({**RECORD, "wall_time": float("nan")}, "bad_message"),
        ({**RECORD, "dp_rank": -1}, "bad_message"),
        ({**RECORD, "scheduled_requests": {**SCHEDULED, "sum_prefill_tokens": 1 << 41}}, "bad_message"),
        ({**RECORD, "scheduled_requests": {**SCHEDULED, "var_prefill_length": -1.0}}, "bad_message"),
        ({"wall_time": 1.0}, "bad_message"),
        (STAT, "bad_message"),
    ],
)  # fmt: skip
def test_invalid_forward_passes_are_rejected(record: object, reason: str) -> None:
    """They have another version or invalid numbers."""
    with pytest.raises(WireError) as raised:
        records.decode_forward_pass(encoded(record), 0.0)
    assert raised.value.reason == reason


def test_load_fields_are_read_by_position() -> None:
    """Older releases have fewer fields."""
    item, *found = records.decode_load(encoded(STAT), 5.0)
    old, *of_old = records.decode_load(encoded(STAT[:6]), 5.0)

    assert (item.running, item.waiting, item.num_tokens, item.max_tokens) == (1, 2, 30, 400)
    assert (item.waiting_uncached_tokens, item.total_tokens, item.max_running) == (6, 70, 8)
    assert found == [5, Totals(1000, 2_000_000)]
    assert (old.running, of_old) == (1, [5, Totals()])


@pytest.mark.parametrize(
    ("before", "tokens", "seconds"),
    [
        (None, 0, 0.0),
        (Totals(), 1000, 2.0),
        (Totals(900, 500_000), 100, 1.5),
        (Totals(1001, 2_000_000), 1000, 0.0),
    ],
)
def test_totals_become_increases(before: Totals | None, tokens: int, seconds: float) -> None:
    """The first totals are the baseline; smaller ones are those of a restarted publisher."""
    item, _, totals = records.decode_load(encoded(STAT), 0.0)
    records.add_increase(item, totals, before)

    assert item.prefill_uncached_tokens == tokens
    assert item.prefill_busy_seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    "record",
    [
        STAT[:3],
        ["Load", *STAT[1:]],
        [*STAT[:1], COUNT_LIMIT + 1, *STAT[2:]],
        [*STAT[:9], -5, 0],
        RECORD,
        None,
    ],
)
def test_invalid_load_records_are_rejected(record: object) -> None:
    """They are too short, of another kind, or have invalid numbers."""
    with pytest.raises(WireError, match="bad_message"):
        records.decode_load(encoded(record), 0.0)


@given(st.binary(max_size=120))
def test_any_bytes_are_a_record_or_rejected(payload: bytes) -> None:
    """No other exception is raised."""
    for decode in (records.decode_forward_pass, records.decode_load):
        try:
            decode(payload, 0.0)
        except WireError:
            continue
