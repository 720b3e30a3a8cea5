"""The page as JSON: for programs that would otherwise parse text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from typing import Any

import msgspec

from sidestep.exposition import passthrough_text as passed
from sidestep.exposition.aggregate import merged_states
from sidestep.exposition.families import Family, families, is_shared, labels_with
from sidestep.exposition.family_snapshot import Copy, combined_of, copies, state_of
from sidestep.metrics.engine import Number
from sidestep.metrics.histogram import State
from sidestep.metrics.registry import Registry

AT_ONCE = 32
"""Samples that are encoded between two turns of the loop: some 10 us each."""

Sample = dict[str, Any]


def pieces(registry: Registry, names: Collection[str] = ()) -> Iterator[bytes]:
    """The page, piece by piece; each family is of one moment, that when it begins."""
    separator = b"["
    for head, samples in _families(registry, names):
        # To copy the state of a thousand engines takes most of a slice.
        yield b""
        begun = False
        waiting: list[bytes] = []
        for number, sample in enumerate(samples, 1):
            if sample is not None:
                waiting.append(msgspec.json.encode(sample))
            if sample is None or not number % AT_ONCE:
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
    registry: Registry, names: Collection[str]
) -> Iterator[tuple[dict[str, Any], Iterator[Sample | None]]]:
    for family in list(families(registry, names)):
        found = copies(registry, family, state_of)
        samples = _combined(family, found) if is_shared(family) else _single(family, found)
        yield {"name": family.name, "type": family.kind, "help": family.help}, samples
    yield from passed.typed(registry.passthrough, names)


def _single(family: Family, found: Iterable[Copy[State]]) -> Iterator[Sample]:
    for engine, _, names, children in found:
        for key, value in children:
            yield _sample(labels_with(engine, family, names, key), value)


def _combined(family: Family, found: Iterable[Copy[State]]) -> Iterator[Sample | None]:
    for one in combined_of(family, found, merged_states):
        yield None if one is None else _sample(dict(one[0]), one[1])


def _sample(labels: dict[str, str], value: Number | State) -> Sample:
    if not isinstance(value, tuple):
        return {"labels": labels, "value": value}
    bounds, counted, total = value
    counts = [*accumulate(counted)]
    buckets = [[bound, count] for bound, count in zip(bounds, counts, strict=False)]
    return {"labels": labels, "buckets": buckets, "count": counts[-1], "sum": total}
