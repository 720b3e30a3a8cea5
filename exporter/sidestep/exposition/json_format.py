"""The metrics page as JSON, for programs that would otherwise parse text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from typing import Any

import msgspec

from sidestep.exposition import passthrough_text
from sidestep.exposition.aggregate import aggregate_states
from sidestep.exposition.aggregated_series import AggregatedSeries, Series
from sidestep.exposition.families import Family, families, is_shared, series_labels
from sidestep.exposition.family_snapshot import EngineSnapshot, histogram_state, snapshot_family
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.metrics.engine import Number
from sidestep.metrics.histogram import State
from sidestep.metrics.registry import Registry

Sample = dict[str, Any]


def pieces(
    registry: Registry,
    names: Collection[str] = (),
    passthrough: PassthroughRegistry | None = None,
) -> Iterator[bytes]:
    """Yield the page in pieces; each family is of the moment of its first piece.

    An empty piece means that the next one takes a while.
    """
    separator = b"["
    for head, samples in _families(registry, names, passthrough):
        # Copying the state of a thousand engines takes most of a slice.
        yield b""
        before = separator + _opened(head)
        for sample in samples:
            if sample is None:
                yield b""
            else:
                yield before + msgspec.json.encode(sample)
                before = separator = b","
        if before == b",":
            yield b"]}"
    yield b"[]" if separator == b"[" else b"]"


def _opened(head: dict[str, Any]) -> bytes:
    return msgspec.json.encode(head)[:-1] + b',"samples":['


def _families(
    registry: Registry, names: Collection[str], passthrough: PassthroughRegistry | None
) -> Iterator[tuple[dict[str, Any], Iterator[Sample | None]]]:
    aggregated = AggregatedSeries(registry)
    for family in list(families(registry, names)):
        if is_shared(family):
            found = aggregated.series(family, histogram_state, aggregate_states)
            samples = _aggregated(found)
        else:
            samples = _single(family, snapshot_family(registry, family, histogram_state))
        yield {"name": family.name, "type": family.kind, "help": family.help}, samples
    if passthrough is not None:
        yield from passthrough_text.json_families(passthrough, names)


def _single(family: Family, found: Iterable[EngineSnapshot[State]]) -> Iterator[Sample]:
    for engine, names, children in found:
        for key, value in children:
            yield _sample(series_labels(engine, family, names, key), value)


def _aggregated(found: Iterable[Series[State] | None]) -> Iterator[Sample | None]:
    for one in found:
        yield None if one is None else _sample(dict(one[0]), one[1])


def _sample(labels: dict[str, str], value: Number | State) -> Sample:
    if not isinstance(value, tuple):
        return {"labels": labels, "value": value}
    bounds, counted, total, _ = value
    counts = [*accumulate(counted)]
    buckets = [[bound, count] for bound, count in zip(bounds, counts, strict=False)]
    return {"labels": labels, "buckets": buckets, "count": counts[-1], "sum": total}
