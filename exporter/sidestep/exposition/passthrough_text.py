"""Passthrough families as text and JSON; they follow the engines' families."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from sidestep.catalog.model import OBSERVED
from sidestep.exposition.passthrough.families import Series
from sidestep.exposition.passthrough.page import Part
from sidestep.exposition.passthrough.parser import Labels, unescape_labels
from sidestep.exposition.passthrough.registry import PassthroughFamily, PassthroughRegistry
from sidestep.exposition.text_format import header


def pieces(
    registry: PassthroughRegistry, *, openmetrics: bool = False, names: Collection[str] = ()
) -> Iterator[list[bytes]]:
    """Yield the families, some thousand samples at a time, all as of the call."""
    found = [(family, family.parts) for family in registry.families(names)]
    for family, parts in found:
        if openmetrics and not family.is_openmetrics:
            continue
        yield [_header(family, openmetrics=openmetrics).encode()]
        for part in parts:
            yield [part.text(openmetrics=openmetrics)]


def _header(family: PassthroughFamily, *, openmetrics: bool) -> str:
    kind: str = family.kind
    # OpenMetrics requires the suffix _total of counters, and calls untyped "unknown".
    if openmetrics and (kind == "untyped" or not _has_openmetrics_counter_name(family)):
        kind = "unknown"
    return header(family.name, kind, family.help, openmetrics=openmetrics)


def _has_openmetrics_counter_name(family: PassthroughFamily) -> bool:
    return family.kind != "counter" or family.name.endswith("_total")


def json_families(
    registry: PassthroughRegistry, names: Collection[str] = ()
) -> Iterator[tuple[dict[str, Any], Iterator[dict[str, Any] | None]]]:
    """Yield each family's description and its samples; None asks to yield to the event loop."""
    for family in registry.families(names):
        samples = _samples(family.parts)
        is_grouped = family.kind in OBSERVED
        found = _grouped_samples(family, samples) if is_grouped else _plain_samples(samples)
        yield {"name": family.name, "type": family.kind, "help": family.help}, found


Sample = tuple[Series, float, float | None]
"""A series, its value, and its timestamp on the page in seconds."""


def _samples(parts: list[Part]) -> Iterator[Sample]:
    for part in parts:
        for series, text in part.samples:
            value, _, stamp = text.partition(b" ")
            number = int(value) if value.isdigit() else float(value)
            yield series, number, int(stamp) / 1000 if stamp else None


def _plain_samples(samples: Iterator[Sample]) -> Iterator[dict[str, Any]]:
    for series, value, stamp in samples:
        time = {} if stamp is None else {"timestamp": stamp}
        yield {"labels": unescape_labels(series.labels), "value": value, **time}


def _grouped_samples(
    family: PassthroughFamily, samples: Iterator[Sample]
) -> Iterator[dict[str, Any] | None]:
    """Yield one sample per histogram or summary, in the form of an engine's histogram."""
    label, key = ("le", "buckets") if family.kind == "histogram" else ("quantile", "quantiles")
    groups: dict[Labels, dict[str, Any]] = {}
    for series, value, _ in samples:
        outer = tuple(pair for pair in series.labels if pair[0] != label)
        group = groups.setdefault(outer, {"labels": unescape_labels(outer), key: []})
        end = series.name.removeprefix(family.name)
        if end in ("_count", "_sum"):
            group[end[1:]] = value
        elif (bound := float(dict(series.labels)[label])) != float("inf"):
            group[key].append([bound, value])
        yield None
    yield from groups.values()
