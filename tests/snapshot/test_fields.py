"""Fields that outlive the process: each survives a snapshot, or is listed here as one that need not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import pytest

from intakes import Fed, steps
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Part
from sidestep.metrics.merge import restore_engine
from sidestep.metrics.totals_codec import SAVED_PARTS, decode_totals, encode_totals, totals_of
from sidestep.protocol.engine_totals import (
    Buckets,
    Child,
    EngineTotals,
    Head,
    Hits,
    NativeBuckets,
    OpenTotals,
    Totals,
)
from sidestep.protocol.messages import EngineInfo, Heartbeat
from sidestep.protocol.stream import Stream, StreamState
from sidestep.requests.request_log import RequestLog
from sidestep.snapshot.capture import (
    Piece,
    SavedEngine,
    SavedFederatedEngine,
    SavedProcess,
    SavedRecords,
    SavedStream,
    _saved_stream,
    _stream,
)
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.requests.front_end import FrontEndState
from sidestep.tracking.requests.inflight_state import GroupState, RequestsState, TrackerState
from sidestep.tracking.requests.machine import RequestTracker
from sidestep.tracking.requests.parallel_samples import SampleGroups
from snapshot_contents import CONTENTS, FURTHER, Held

FROM_RUNS = {"scalars", "histograms", "keyed", "open", "hits", "seen", "polled"}
"""Fields that recorded runs fill."""
NUMBERS = {
    "gauge_stamp": 7.5, "held_tokens": 7, "restarts": 3, "last_seen": 1.5, "created": 1.5,
}  # fmt: skip
OF_FOLDED_ITEMS = {"limited", "cut_off", "blocks", "process", "processes"}
"""Fields of records that senders fold; a snapshot has them elsewhere."""
GUIDE = "see 'Add a field that outlives the exporter's process' in CONTRIBUTING.md"

STREAM: dict[str, Any] = {
    "id": "s", "incarnation": 5, "seq": 6, "dropped": 7, "errors": 8, "folded": 9,
    "engines": [EngineInfo("e", "vllm")], "beat": Heartbeat(5, 6, 0), "retired": {1: 4}, "mark": [2],
    "replica": 2, "server": "k", "process": "p",
    "state": StreamState.CLOSED,
}  # fmt: skip
STRUCTS = (
    Buckets, Child, FrontEndState, GroupState, Head, Hits, NativeBuckets, OpenTotals, RequestsState,
    SavedEngine, SavedProcess, SavedRecords, SavedStream, Totals, TrackerState,
)  # fmt: skip
"""The wire structs of a snapshot."""


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    """Return the engines of recorded runs."""
    fed = Fed(rate=1.0)
    for run in ("core_lora", "sglang", "triton"):
        fed.feed(steps(run))
    return [*fed.intake.registry.engines.values()]


def saved(engine: Engine) -> EngineTotals:
    """Return the record of an engine in a snapshot."""
    return decode_totals(encode_totals(engine, totals_of(engine)))


def restored(record: EngineTotals) -> Totals:
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
    (held,) = (held for held in CONTENTS if held.state is Stream)
    assert STREAM.keys() == held.saved.keys()
    stream = Stream(**STREAM)
    found = _stream(_saved_stream(stream))
    assert {name: getattr(found, name) for name in STREAM} == STREAM


@pytest.fixture(scope="module")
def objects() -> dict[type, object]:
    """Return an object of each class of state that has no list of its fields."""
    intake = Fed().intake
    tracker = RequestTracker()
    engine = intake.registry.register(EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"}))
    parts = [part() for part in Part.__subclasses__()]
    made = [engine, *parts, intake, intake.receiver, intake.registry, intake.metrics, tracker, tracker.requests, tracker.samples,
            tracker.outputs, tracker.reports, tracker.parts, SampleGroups(), RequestLog([], SelfMetrics())]  # fmt: skip
    return {type(each): each for each in made}


def fields(state: type, objects: Mapping[type, object]) -> set[str]:
    """Return the fields of a class of state."""
    if dataclasses.is_dataclass(state):
        return {field.name for field in dataclasses.fields(state)}
    return {*vars(objects[state])} if state in objects else {*vars(state)["__slots__"]}


@pytest.mark.parametrize("held", CONTENTS, ids=lambda held: held.state.__name__)
def test_the_list_has_every_field_of_a_class(held: Held, objects: dict[type, object]) -> None:
    """A new field is in a snapshot, or begins anew."""
    assert fields(held.state, objects) == held.saved.keys() | {*held.anew.split()}, GUIDE
    assert held.saved.keys().isdisjoint(held.anew.split())


def test_the_list_has_every_field_of_a_snapshot() -> None:
    """A new field of a struct is of a field of the state."""
    names = {struct.__name__: struct.__struct_fields__ for struct in STRUCTS}
    places = {place for held in CONTENTS for text in held.saved.values() for place in text.split()}
    places |= {*FURTHER.split()}
    whole = {place for place in places if "." not in place}
    assert whole <= names.keys()
    every = {f"{name}.{field}" for name, found in names.items() for field in found}

    assert every == places - whole, GUIDE
    assert {*get_args(Piece)} - {SavedFederatedEngine} <= {*STRUCTS}


def test_the_list_has_every_part_of_an_engine() -> None:
    """Those with saved fields of their own are the ones that write and read totals."""
    parts = {held.state: held for held in CONTENTS if issubclass(held.state, Part)}
    assert {*Part.__subclasses__()} == parts.keys(), GUIDE
    saved = {kind for kind in parts if kind.save is not Part.save}
    assert saved == {*SAVED_PARTS}
    assert all(parts[kind].saved for kind in saved)
