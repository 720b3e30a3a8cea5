"""Fields that outlive the process: each survives a snapshot, or is listed here as one that need not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from intakes import Fed, steps
from sidestep.metrics.engine import Engine
from sidestep.metrics.merge import restore_engine
from sidestep.metrics.record_codec import decode_record, encode_record, totals_of
from sidestep.protocol.messages import EngineInfo, Heartbeat
from sidestep.protocol.records import Record, Totals
from sidestep.protocol.stream import Stream, StreamState
from sidestep.snapshot.capture import SavedStream, _saved_stream, _stream

FROM_RUNS = {"scalars", "histograms", "keyed", "open", "hits", "seen", "polled"}
"""Fields that recorded runs fill."""
NUMBERS = {
    "gauge_stamp": 7.5, "held_tokens": 7, "restarts": 3, "last_seen": 1.5, "created": 1.5,
}  # fmt: skip
OF_FOLDED_ITEMS = {"limited", "cut_off", "blocks"}
"""Fields of records that senders fold; a snapshot has them elsewhere."""
GUIDE = "docs/architecture.md, `what a snapshot holds`, has the places of a field that outlives the process"

STREAM: dict[str, Any] = {
    "id": "s", "incarnation": 5, "seq": 6, "dropped": 7, "errors": 8, "folded": 9,
    "engines": [EngineInfo("e", "vllm")], "beat": Heartbeat(5, 6, 0), "retired": {1: 4}, "mark": [2],
    "replica": 2, "server": "k", "process": "p",
    "state": StreamState.CLOSED,
}  # fmt: skip
OF_THE_PROCESS = {
    "peer", "durable", "seen_at", "silent", "unanswered", "duplicates", "acked", "acked_at", "received",
    "caught_up",
}  # fmt: skip
"""Fields of a stream that begin anew with the exporter's process or with the next Hello."""


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    """Return the engines of recorded runs."""
    fed = Fed(rate=1.0)
    for run in ("core_lora", "sglang", "triton"):
        fed.feed(steps(run))
    return [*fed.intake.registry.engines.values()]


def saved(engine: Engine) -> Record:
    """Return the record of an engine in a snapshot."""
    return decode_record(encode_record(engine, totals_of(engine)))


def restored(record: Record) -> Totals:
    """Return the totals after a restart, a minute after the engine's first items."""
    registry = Fed(rate=1.0).intake.registry
    registry.wall = lambda: 60.0
    return totals_of(restore_engine(registry, record))


def test_every_field_of_an_engine_has_a_test() -> None:
    """A new one needs more than its line in the struct."""
    assert {*Totals.__struct_fields__} == FROM_RUNS | NUMBERS.keys() | OF_FOLDED_ITEMS, GUIDE


@pytest.mark.parametrize("field", sorted(FROM_RUNS))
def test_series_survive(field: str, engines: list[Engine]) -> None:
    """Those of every engine."""
    values = [(getattr(saved(engine).totals, field), saved(engine)) for engine in engines]
    assert any(value for value, _ in values)
    for value, record in values:
        assert getattr(restored(record), field) == value


@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_of_an_engine_survive(field: str, engines: list[Engine]) -> None:
    """Whatever they are."""
    record = saved(engines[0])
    setattr(record.totals, field, NUMBERS[field])
    assert getattr(restored(record), field) == NUMBERS[field]


def test_every_field_of_a_stream_survives() -> None:
    """Unless it is of the process."""
    fields = {field.name for field in dataclasses.fields(Stream)}
    assert fields == STREAM.keys() | OF_THE_PROCESS, GUIDE
    assert {*SavedStream.__struct_fields__} == (STREAM.keys() - {"state"}) | {
        "open",
        "retired_seqs",
    }
    stream = Stream(**STREAM)
    found = _stream(_saved_stream(stream))
    assert {name: getattr(found, name) for name in STREAM} == STREAM
