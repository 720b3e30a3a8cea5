"""Forged messages of every kind, whole and damaged, in any order, do no harm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from harm import World
from sidestep.catalog.row import Sampled
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.vllm.wire import VllmRejection, VllmSleep, VllmStep
from sidestep.metrics.totals_codec import encode_totals, totals_of
from sidestep.protocol.block_events import BlockEvents, CacheEvents
from sidestep.protocol.engine_totals import Totals
from sidestep.protocol.limits import COUNT_LIMIT, MAX_LABEL_CHARS, VALUE_LIMIT, VERSION
from sidestep.protocol.messages import CORE, FRONT_END, Bye, EngineInfo, Heartbeat, Hello
from sidestep.protocol.request_events import RequestEvents
from sidestep.protocol.self_described import Family, Samples
from sidestep_adapters.streams.wire import ForwardPass, LoadStat

encode = msgspec.msgpack.Encoder().encode
Values = st.SearchStrategy[Any]

EXTREME_INTEGERS = (
    -1, -(2**63), COUNT_LIMIT, COUNT_LIMIT + 1, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
EXTREME_FLOATS = (
    -0.0, -1.0, 5e-324, VALUE_LIMIT, -VALUE_LIMIT, 2 * VALUE_LIMIT, 1.7e308, -1.7e308,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
RAW = {
    "not UTF-8": b"\xa3\xff\xfe\x00",
    "a surrogate": b"\xa3\xed\xa0\x80",
    "nesting": b"\x91" * 2000 + b"\xc0",
    "a length that is not there": b"\xdd\xff\xff\xff\xff",
    "a key twice": b"\x82\xa1a\xa1b\xa1a\xa1c",
    "an extension": b"\xc7\x01\x05\x00",
    "never used": b"\xc1",
}
TEXTS = (
    "", "a", "b", "0", "1", "m", "stored", "begun", "lost", "a\nb", "\x00", "\r", "\x85", "\u2028", "\u202e", "\\", '"',
    '"} 1\nfake_total{a="', "{", "x" * MAX_LABEL_CHARS, "x" * (MAX_LABEL_CHARS + 1), "\U0001f600", "__other__",
    "GPU", "CPU", "position", "request_tokens", "inter_token_latency", "engine_core", "spec_decode", "lora",
    "core:lora", "kv_sampling", "rate", "limits", "max_running_requests", "max_lora", "cache_config", "vllm", "honest", "starting", "asleep", "paused",
)  # fmt: skip
LABELS = (
    "a", "b", "pod", "model", "version", "batch_size", "engine", "le", "quantile", "origin", "position",
    "model_name", "__name__", "9", "", "a" * 129,
)  # fmt: skip
ROWS = [row for dialect in DIALECTS.values() for row in dialect.rows]
FAMILIES = (
    "own", "own_total", "own_seconds", "own_count", "own_sum", "own_bucket", "own_created", "_total", ":",
    "sidestep_series", "process_cpu_seconds_total", "python_info", "up_info", "x" * 128,
    *sorted(row.name for row in ROWS)[::7],
    *(row.name for row in ROWS if "cached_block" in row.name or "process" in row.name),
)  # fmt: skip
NAMES = {
    "engine": st.sampled_from([0] * 20 + [1, 2, 300]),
    "source": st.sampled_from([1, 1, 1, 2]),
    "request": st.integers(0, 5),
    "group": st.sampled_from([0, 1, 2]),
    "sample": st.integers(0, 3),
    "version": st.sampled_from([1, 1, 1, 1, 0, 2**63]),
    "dialect": st.sampled_from(
        ["vllm"] * 6 + ["sglang"] * 3 + ["stream"] * 3 + ["triton"] * 3 + ["abacus"]
    ),
    "stream": st.sampled_from(["one", "two"]),
    "id": st.sampled_from(["one", "two", "three"]),
    "kinds": st.binary(min_size=5, max_size=5).map(lambda data: bytes(byte % 4 for byte in data)),
    "blocks": st.lists(st.integers(0, 5), min_size=5, max_size=5),
    "stamps": st.lists(st.sampled_from([0.0, 1.0, 2.0, 9.0, 1e15]), min_size=5, max_size=5),
    "hashes": st.lists(st.integers(0, 5), max_size=8),
    "requests": st.lists(st.integers(0, 5), max_size=8),
    "scheduled": st.none() | st.lists(st.integers(0, 5), max_size=8),
}
"""Strategies of fields for which nearly all random values would be refused or match nothing."""
WILD = 6
"""One in this many structs has fields beyond their limits, or of another type."""


def wrong() -> Values:
    """Return values of no type, or of a wrong one."""
    raw = st.sampled_from(sorted(RAW)).map(lambda name: msgspec.Raw(RAW[name]))
    other: Values = st.sampled_from(
        [None, True, 2**64 - 1, -1, 0.5, "x", b"x", [], {}, [[]], {"a": 1}]
    )
    return raw | other


WRONG = wrong()
CATALOGUED = st.sampled_from([row for row in ROWS if isinstance(row.source, Sampled)]).flatmap(
    lambda row: st.tuples(
        st.just(row.name),
        st.just(row.kind),
        st.just(list(row.own_labels)),
        st.lists(
            st.tuples(
                st.just(["0"] * len(row.own_labels)),
                st.sampled_from([0.0, 1.0, -1.0, VALUE_LIMIT]),
                st.lists(st.sampled_from([0.0, 1.0, -1.0, 1.7e308, float("nan")]), max_size=3),
            ).map(list),
            max_size=3,
        ),
    ).map(list)
)
"""Families of the catalogue."""


def of(kind: inspect.Type, *, wild: bool = True) -> Values:
    """Return values for a field of type ``kind``, all within its limits unless ``wild``."""
    right = _right(kind, wild)
    return st.integers(0, 9).flatmap(lambda n: right if n else WRONG) if wild else right


@cache
def struct(kind: type[msgspec.Struct]) -> Values:
    """Return structs of a class as lists, some with missing fields or one too many."""
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    tame, wild = _struct(found, wild=False), _struct(found, wild=True)
    return st.integers(1, WILD).flatmap(lambda n: tame if n < WILD else wild)


def _struct(kind: inspect.StructType, *, wild: bool) -> Values:
    fields = [
        NAMES[field.name] if _is_named(field) else of(field.type, wild=wild)
        for field in kind.fields
    ]
    required = sum(field.required for field in kind.fields)
    tag = [] if kind.tag is None else [st.just(kind.tag)]
    whole = st.tuples(*tag, *fields).map(list)
    if kind.cls is Family:
        whole = st.one_of(whole, CATALOGUED)
    lengths = [len(fields)] * 6 + [required, 99] + [max(required - 1, 0)] * wild
    return st.builds(_cut, whole, st.sampled_from(lengths).map(lambda n: n + len(tag)))


def _is_named(field: inspect.Field) -> bool:
    # ``requests`` is a number in cache lookups, and a list in outputs.
    return field.name in NAMES and not (
        field.name == "requests" and isinstance(field.type, inspect.IntType)
    )


def _cut(fields: list[Any], length: int) -> list[Any]:
    return [*fields[:length], *([None] if length > len(fields) else [])]


def _right(kind: inspect.Type, wild: bool) -> Values:  # noqa: C901, PLR0912 - a case for each kind
    made: Values
    match kind:
        case inspect.BoolType():
            made = st.booleans()
        case inspect.NoneType():
            made = st.none()
        case inspect.IntType(ge=least, le=most):
            most = 2**64 - 1 if most is None else most
            usual = st.integers(0, min(3, most)) | st.integers(0, min(3000, most))
            tame = usual | st.sampled_from([most, most // 2])
            made = tame | st.sampled_from(EXTREME_INTEGERS) if wild else tame
        case inspect.FloatType(ge=least, le=most):
            every = [0.0, 0.5, 1.0, 2.0, 3.0, 7.0, 100.0, 90_000.0]
            every += [] if wild else [most or 1.7e308, *([] if least == 0.0 else [-1.0])]
            fitting = [v for v in every if most is None or v <= most]
            made = st.sampled_from(fitting) | st.integers(0, 1)
            made = made | st.sampled_from(EXTREME_FLOATS) if wild else made
        case inspect.StrType(pattern=pattern) if pattern is not None and "__" in pattern:
            made = st.sampled_from(LABELS if wild else LABELS[:8])
        case inspect.StrType(pattern=pattern) if pattern is not None:
            made = st.sampled_from(FAMILIES)
        case inspect.StrType(max_length=most):
            made = st.sampled_from([x for x in TEXTS if wild or len(x) <= (most or 999)])
            made = made | st.text(max_size=4)
        case inspect.BytesType():
            made = st.binary(max_size=9)
        case inspect.LiteralType(values=values):
            made = st.sampled_from(values)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            made = st.lists(of(item, wild=wild), max_size=4)
        case inspect.TupleType(item_types=items):
            made = st.tuples(*(of(item, wild=wild) for item in items)).map(list)
        case inspect.DictType(key_type=key, value_type=value):
            made = st.dictionaries(_right(key, wild), of(value, wild=wild), max_size=3)
        case inspect.UnionType(types=types):
            made = st.one_of(*(of(each, wild=wild) for each in types))
        case inspect.StructType():
            made = _struct(kind, wild=wild)
        case inspect.RawType():
            made = st.binary(max_size=9).map(msgspec.Raw)
        case other:
            raise TypeError(other)
    return made


def encoded(values: Values) -> st.SearchStrategy[bytes]:
    """Return the encoded bytes of ``values``."""
    return values.map(encode)


def bent(frames: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Return frames with flipped bits, cut off, or spliced with another."""
    changes = st.lists(
        st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=3
    )
    flipped = st.builds(_flip, frames, changes)
    cut = st.builds(lambda data, at: data[: at % max(len(data), 1)], frames, st.integers(0, 2**16))
    spliced = st.builds(_splice, frames, frames, st.integers(0, 2**16), st.integers(0, 2**16))
    return flipped | cut | spliced


def _flip(data: bytes, changes: Sequence[tuple[int, int]]) -> bytes:
    made = bytearray(data)
    for at, byte in changes:
        if made:
            made[at % len(made)] = byte
    return bytes(made)


def _splice(data: bytes, other: bytes, at: int, start: int) -> bytes:
    return data[: at % (len(data) + 1)] + other[start % (len(other) + 1) :]


ITEMS = (
    VllmStep,
    VllmSleep,
    VllmRejection,
    Samples,
    RequestEvents,
    BlockEvents,
    CacheEvents,
    ForwardPass,
    LoadStat,
)
items = encoded(st.sampled_from(ITEMS).flatmap(struct))
infos = st.builds(
    EngineInfo,
    st.sampled_from(["one", "two", "three"]),
    st.sampled_from(["vllm", "vllm", "stream"]),
    st.dictionaries(
        st.sampled_from(["pod", "zone"]), st.sampled_from(["", "a", "b"]), max_size=2
    ).map(lambda more: {"engine": "0", "model_name": "m", **more}),
    features=st.lists(st.sampled_from(["engine_core", "spec_decode", "lora"]), max_size=2),
    closed=st.dictionaries(
        st.just("position"), st.lists(st.text(max_size=2), max_size=3), max_size=1
    ),
    bounds=st.dictionaries(
        st.sampled_from(["request_tokens", "inter_token_latency"]),
        st.sampled_from([[0.5, 1.0], [0.0], [1.0, 2.0, 3.0]]),
        max_size=2,
    ),
    role=st.sampled_from(["", CORE, FRONT_END]),
)


class Attacker:
    """Sender of two streams that keeps correct seqs, so that its messages are accepted."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.incarnations = {"one": 1, "two": 2}
        self.seqs = {"one": 0, "two": 0}

    def send(self, stream: str, *parts: Any) -> None:
        """Send a message of these fields."""
        self.world.take(stream.encode(), encode(list(parts)))

    def send_hello(self, stream: str, engines: list[EngineInfo], first: int = 1) -> None:
        """Send a valid Hello."""
        said = (
            "H",
            VERSION,
            stream,
            self.incarnations[stream],
            1,
            self.seqs[stream] + first,
            engines,
        )
        self.send(stream, *said)
        self.seqs[stream] += first - 1

    def restart(self, stream: str) -> None:
        """Switch to another incarnation, which has sent no Hello."""
        self.incarnations[stream] += 10
        self.seqs[stream] = 0

    def batch(self, stream: str, found: list[bytes], skip: int = 0) -> None:
        """Send items, with the next seqs or others."""
        first = self.seqs[stream] + 1 + skip
        self.send(
            stream, "B", self.incarnations[stream], first, [msgspec.Raw(item) for item in found]
        )
        self.seqs[stream] += 0 if skip else len(found)

    def aggregate(self, stream: str, found: list[bytes], count: int) -> None:
        """Send records as ``count`` folded items."""
        first, last = self.seqs[stream] + 1, self.seqs[stream] + count
        records = [msgspec.Raw(record) for record in found]
        self.send(stream, "G", self.incarnations[stream], first, last, records)
        self.seqs[stream] += count

    def records(self, stream: str, data: st.DataObject) -> list[bytes]:
        """Return records of an engine of the stream, perhaps with one field forged."""
        engines = self.world.intake.bindings.engines.get(self.incarnations[stream], [])
        if not engines:
            return []
        engine = data.draw(st.sampled_from(engines))
        totals = totals_of(engine)
        if data.draw(st.booleans()):
            return [encode_totals(engine, totals)]
        head, plain = msgspec.msgpack.decode(encode_totals(engine, totals))
        fields = msgspec.inspect.type_info(Totals).fields  # type: ignore[attr-defined]
        changed = data.draw(st.integers(0, len(fields) - 1))
        value = data.draw(of(fields[changed].type))
        if isinstance(value, list) and isinstance(plain[changed], list) and plain[changed]:
            # In the column's place, so that it has its length.
            for one in value:
                plain[changed][data.draw(st.integers(0, len(plain[changed]) - 1))] = one
        else:
            plain[changed] = value
        return [encode([head, plain])]


EXAMPLES = int(os.environ.get("HOSTILE_EXAMPLES", "16"))
STREAMS = st.sampled_from(["one", "two"])


def attack(attacker: Attacker, data: st.DataObject) -> None:  # noqa: C901 - a case for each deed
    """Do one thing that a hostile peer may do."""
    stream = data.draw(STREAMS)
    world = attacker.world
    match data.draw(st.sampled_from("iiiiiiiiaaaaaahHrkbfpst")):
        case "i":
            found = data.draw(st.lists(items, min_size=1, max_size=9))
            attacker.batch(stream, found, data.draw(st.sampled_from([0] * 8 + [1, -1])))
        case "a":
            attacker.aggregate(
                stream, attacker.records(stream, data), data.draw(st.sampled_from([1, 1, 1, 9]))
            )
        case "h":
            attacker.send_hello(
                stream,
                data.draw(st.lists(infos, max_size=3)),
                data.draw(st.sampled_from([1, 1, 5])),
            )
        case "H":
            world.take(stream.encode(), data.draw(encoded(struct(Hello))))
        case "r":
            attacker.restart(stream)
            attacker.send_hello(stream, data.draw(st.lists(infos, max_size=3)))
        case "k":
            said = data.draw(struct(Heartbeat))
            attacker.send(stream, "b", attacker.incarnations[stream], *said[2:])
        case "b":
            attacker.send(stream, *data.draw(struct(Bye)))
            attacker.send(stream, "X", attacker.incarnations[stream], attacker.seqs[stream])
        case "f":
            world.take(stream.encode(), *data.draw(st.lists(st.binary(max_size=9), max_size=3)))
        case "p":
            world.advance(data.draw(st.sampled_from([1.0, 31.0, 301.0])))
        case "s":
            # Items of one kind, damaged: those of another are refused at their first byte.
            attacker.batch(stream, data.draw(st.lists(bent(items), max_size=3)))
        case _:
            frame = encode(["B", attacker.incarnations[stream], attacker.seqs[stream] + 1, []])
            world.take(stream.encode(), data.draw(bent(st.just(frame))))


@settings(
    max_examples=EXAMPLES,
    phases=[Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_no_sequence_of_messages_does_harm(data: st.DataObject) -> None:
    """Nothing raises, no counter decreases, page and snapshot stay valid, and counts of others exact."""
    world = World(scale=data.draw(st.booleans()))
    attacker = Attacker(world)
    for stream in attacker.seqs:
        attacker.send_hello(stream, data.draw(st.lists(infos, min_size=1, max_size=3)))
    world.be_honest()
    for _ in range(data.draw(st.integers(3, 12))):
        attack(attacker, data)
        world.be_honest()
        world.check_counters()
        world.check_honest()
    world.check()
