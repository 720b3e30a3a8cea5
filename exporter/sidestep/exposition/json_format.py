"""The metrics page as JSON, for programs that would otherwise parse text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from typing import Any

import msgspec

from sidestep.exposition import passthrough_text
from sidestep.exposition.aggregate import aggregate_states
from sidestep.exposition.families import Family, families, is_shared, series_labels
from sidestep.exposition.family_snapshot import (
    EngineSnapshot,
    aggregate_snapshot,
    histogram_state,
    snapshot_family,
)
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.metrics.engine import Number
from sidestep.metrics.histogram import State
from sidestep.metrics.registry import Registry

PER_SLICE = 32
"""Samples to encode before yielding to the event loop: some 10 us each."""

Sample = dict[str, Any]


def pieces(
    registry: Registry,
    names: Collection[str] = (),
    passthrough: PassthroughRegistry | None = None,
) -> Iterator[bytes]:
    """Yield the page in pieces; each family is of the moment of its first piece."""
    separator = b"["
    for head, samples in _families(registry, names, passthrough):
        # Copying the state of a thousand engines takes most of a slice.
        yield b""
        begun = False
        waiting: list[bytes] = []
        for number, sample in enumerate(samples, 1):
            if sample is not None:
                waiting.append(msgspec.json.encode(sample))
            if sample is None or not number % PER_SLICE:
                if not waiting:
                    yield b""
                    continue
                yield (b"," if begun else separator + _opened(head)) + b",".join(waiting)
                begun, waiting = True, []
        if waiting:
            yield (b"," if begun else separator + _opened(head)) + b",".join(waiting)
            begun = True
        if begun:
            separator = b","
        yield b"]}" if begun else b""
    yield b"[]" if separator == b"[" else b"]"


def _opened(head: dict[str, Any]) -> bytes:
    return msgspec.json.encode(head)[:-1] + b',"samples":['


def _families(
    registry: Registry, names: Collection[str], passthrough: PassthroughRegistry | None
) -> Iterator[tuple[dict[str, Any], Iterator[Sample | None]]]:
    for family in list(families(registry, names)):
        found = snapshot_family(registry, family, histogram_state)
        samples = _combined(family, found) if is_shared(family) else _single(family, found)
        yield {"name": family.name, "type": family.kind, "help": family.help}, samples
    if passthrough is not None:
        yield from passthrough_text.json_families(passthrough, names)


def _single(family: Family, found: Iterable[EngineSnapshot[State]]) -> Iterator[Sample]:
    for engine, _, names, children in found:
        for key, value in children:
            yield _sample(series_labels(engine, family, names, key), value)


def _combined(family: Family, found: Iterable[EngineSnapshot[State]]) -> Iterator[Sample | None]:
    for one in aggregate_snapshot(family, found, aggregate_states):
        yield None if one is None else _sample(dict(one[0]), one[1])


def _sample(labels: dict[str, str], value: Number | State) -> Sample:
    if not isinstance(value, tuple):
        return {"labels": labels, "value": value}
    bounds, counted, total = value
    counts = [*accumulate(counted)]
    buckets = [[bound, count] for bound, count in zip(bounds, counts, strict=False)]
    return {"labels": labels, "buckets": buckets, "count": counts[-1], "sum": total}
