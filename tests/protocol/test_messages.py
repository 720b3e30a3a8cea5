"""Bounds of what a peer may send, as CONTRIBUTING.md describes them: in the type of each field, or listed here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from exporters import DATA
from sidestep.engines.dialects import DIALECTS
from sidestep.protocol.engine_totals import EngineTotals
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.messages import FromExporter, FromSender
from sidestep.protocol.request_events import LIMITS
from sidestep.protocol.self_described import Samples
from sidestep.snapshot.capture import Piece
from sidestep_adapters.recording import format as recording

CHECKED_ELSEWHERE = {
    "Hello.version": "compared with VERSION",
    "Ack.version": "compared with VERSION",
    "Progress.engine": "an index that Intake._report checks",
    "Head.core_info": "only the size of a frame limits it: nothing reads it of a sender",
    "OpenTotals.help": "only the size of a frame limits it: self_described reads it of new families",
    **dict.fromkeys(
        ("Totals.scalars[]", "Buckets.total", "Buckets.counts[]", "Child.value"),
        "merge.check_totals",
    ),
    **dict.fromkeys(
        ("NativeBuckets.zeros", "NativeBuckets.counts[]"), "exponential_buckets.check_native"
    ),
    **dict.fromkeys(
        (
            "Sample.observations[]",
            "IterationStats.time_to_first_tokens_iter[]",
            "IterationStats.inter_token_latencies_iter[]",
            "FrontEndLatencies.time_to_first_tokens[]",
            "FrontEndLatencies.e2e_latencies[]",
            "FrontEndLatencies.queue_times[]",
        ),
        "a histogram refuses what is not finite, negative or too large",
    ),
    **dict.fromkeys(
        ("CacheChange.hashes[]", "Lookup.hot[]", "Lookup.sampled[]", "Released.sampled[]"),
        "numbers of 64 bits, which nothing adds up",
    ),
    **dict.fromkeys(
        (
            "ModelStats.last_inference",
            "ModelStats.inference_count",
            "ModelStats.execution_count",
            "Timed.count",
            "Timed.ns",
            "Batch.batch_size",
            "Batch.count",
            "Batch.compute_input_ns",
            "Batch.compute_infer_ns",
            "Batch.compute_output_ns",
            "Memory.byte_size",
        ),
        "a server's own totals, in nanoseconds and bytes: numbers of 64 bits",
    ),
}
"""Parts of fields whose type has no bound, and what bounds them."""
GUIDE = "see 'A limit on what a peer may send' in CONTRIBUTING.md"


def unbounded(kind: Any, path: str, seen: set[type]) -> Iterator[str]:
    """Yield the parts of a type that may have any size."""
    limits = [
        getattr(kind, name) for name in ("max_length", "le", "pattern") if hasattr(kind, name)
    ]
    if limits and all(limit is None for limit in limits):
        yield path
    parts = [(path, each) for name in ("types", "item_types") for each in getattr(kind, name, ())]
    inner = ("item_type", "key_type", "value_type")
    parts += [(f"{path}[]", getattr(kind, name)) for name in inner if hasattr(kind, name)]
    if isinstance(kind, inspect.StructType) and kind.cls not in seen:
        seen.add(kind.cls)
        parts += [(f"{kind.cls.__name__}.{each.name}", each.type) for each in kind.fields]
    for name, each in parts:
        yield from unbounded(each, name, seen)


def test_every_field_has_a_bound() -> None:
    """A new field without one would let a peer fill the exporter's memory."""
    items = {item for dialect in DIALECTS.values() for item in dialect.items}
    roots: list[Any] = [FromSender, FromExporter, Samples, EngineTotals, *items]
    seen: set[type] = set()
    found = {
        path for root in roots for path in unbounded(msgspec.inspect.type_info(root), "", seen)
    }

    assert found == CHECKED_ELSEWHERE.keys(), GUIDE


PARTS = ("types", "item_types", "item_type", "key_type", "value_type")


def brief(kind: Any, structs: dict[type, str]) -> str:
    """Return a type in short, and put its structs with their fields into ``structs``."""
    if isinstance(kind, inspect.StructType):
        if kind.cls not in structs:
            structs[kind.cls] = ""
            fields = [f"{each.encode_name}:{brief(each.type, structs)}" for each in kind.fields]
            form = "list" if kind.array_like else "map"
            structs[kind.cls] = " ".join([kind.cls.__name__, f"{kind.tag}", form, *fields])
        return kind.cls.__name__
    found = [getattr(kind, name) for name in PARTS if hasattr(kind, name)]
    inner = [each for one in found for each in (one if isinstance(one, tuple) else (one,))]
    names = [brief(each, structs) for each in inner]
    if isinstance(kind, inspect.UnionType):
        return "|".join(sorted(names))
    own = type(kind).__name__.removesuffix("Type")
    return f"{own}[{','.join(names)}]" if names else own


def wire_lines() -> list[str]:
    """Return all structs on the wire and in files with their fields, and values that are sent as their places."""
    items = {item for dialect in DIALECTS.values() for item in dialect.items}
    polled = {dialect.polled for dialect in DIALECTS.values() if dialect.polled}
    records = recording.StreamStart | recording.Items
    structs: dict[type, str] = {}
    for root in (FromSender, FromExporter, EngineTotals, Piece, records, *items, *polled):
        brief(inspect.type_info(root), structs)
    return sorted([*structs.values(), " ".join(LIMITS), " ".join(FINISH_REASONS)])


def test_fields_keep_their_places() -> None:
    """Releases read what others of them since 1.0 send, save and record: new fields come last."""
    now = [f"{line} " for line in wire_lines()]
    for line in (DATA / "wire_1.0.txt").read_text(encoding="ascii").splitlines():
        assert any(each.startswith(f"{line} ") for each in now), line
