"""Other exporters' families as text: after ours, in both formats."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from sidestep.catalog.model import OBSERVED
from sidestep.exposition.passthrough.page import Moment, Part, Series
from sidestep.exposition.passthrough.parser import Labels, plain
from sidestep.exposition.passthrough.registry import Passed, PassedFamily
from sidestep.exposition.text_format import header


def pieces(
    passed: Passed, *, openmetrics: bool = False, names: Collection[str] = ()
) -> Iterator[list[bytes]]:
    """The families, some thousand samples at a time; all are of the moment of the call."""
    moment = passed.moment
    found = [(family, family.shown) for family in passed.families(names)]
    for family, parts in found:
        if openmetrics and not family.is_openmetrics:
            continue
        yield [_header(family, openmetrics=openmetrics).encode()]
        for part in parts:
            yield [part.text(moment, openmetrics=openmetrics)]


def _header(family: PassedFamily, *, openmetrics: bool) -> str:
    kind: str = family.kind
    # OpenMetrics has counters of one suffix only, and another word for what has no type.
    if openmetrics and (kind == "untyped" or not _may_be(family)):
        kind = "unknown"
    return header(family.name, kind, family.help, openmetrics=openmetrics)


def _may_be(family: PassedFamily) -> bool:
    return family.kind != "counter" or family.name.endswith("_total")


def typed(
    passed: Passed, names: Collection[str] = ()
) -> Iterator[tuple[dict[str, Any], Iterator[dict[str, Any] | None]]]:
    """The families as values: what each is, and its samples; None where a turn is due."""
    moment = passed.moment
    for family in passed.families(names):
        read = _read(family.shown, moment)
        samples = _observed(family, read) if family.kind in OBSERVED else _plain(read)
        yield {"name": family.name, "type": family.kind, "help": family.help}, samples


Read = tuple[Series, float, float | None]
"""A sample: its value, and the time that the page has for it, in seconds."""


def _read(parts: list[Part], moment: Moment) -> Iterator[Read]:
    for part in parts:
        for series, text in zip(part.series, part.values(moment), strict=True):
            value, _, stamp = text.partition(b" ")
            number = int(value) if value.isdigit() else float(value)
            yield series, number, int(stamp) / 1000 if stamp else None


def _plain(read: Iterator[Read]) -> Iterator[dict[str, Any]]:
    for series, value, stamp in read:
        time = {} if stamp is None else {"timestamp": stamp}
        yield {"labels": plain(series.labels), "value": value, **time}


def _observed(family: PassedFamily, read: Iterator[Read]) -> Iterator[dict[str, Any] | None]:
    """One a group; bounds and quantiles with their values, as an engine's histogram has them."""
    label, key = ("le", "buckets") if family.kind == "histogram" else ("quantile", "quantiles")
    groups: dict[Labels, dict[str, Any]] = {}
    for series, value, _ in read:
        outer = tuple(pair for pair in series.labels if pair[0] != label)
        group = groups.setdefault(outer, {"labels": plain(outer), key: []})
        end = series.name.removeprefix(family.name)
        if end in ("_count", "_sum"):
            group[end[1:]] = value
        elif (bound := float(dict(series.labels)[label])) != float("inf"):
            group[key].append([bound, value])
        yield None
    yield from groups.values()
