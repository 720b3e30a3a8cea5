"""Other exporters' families as text: after ours, in both formats."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from sidestep.catalogue.model import OBSERVED
from sidestep.exposition import Labels, plain
from sidestep.pages import Series
from sidestep.passed import Passed, PassedFamily
from sidestep.render.words import header


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


def typed(passed: Passed, names: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The families as values."""
    moment = passed.moment
    for family in passed.families(names):
        found = [
            (series, *_numbers(value))
            for part in family.shown
            for series, value in zip(part.series, part.values(moment), strict=True)
        ]
        yield {
            "name": family.name,
            "type": family.kind,
            "help": family.help,
            "samples": list(_observed(family, found) if family.kind in OBSERVED else _plain(found)),
        }


Read = tuple[Series, float, float | None]
"""A sample: its value, and the time that the page has for it, in seconds."""


def _numbers(text: bytes) -> tuple[float, float | None]:
    value, _, stamp = text.partition(b" ")
    number = int(value) if value.isdigit() else float(value)
    return number, int(stamp) / 1000 if stamp else None


def _plain(found: list[Read]) -> Iterator[dict[str, Any]]:
    for series, value, stamp in found:
        time = {} if stamp is None else {"timestamp": stamp}
        yield {"labels": plain(series.labels), "value": value, **time}


def _observed(family: PassedFamily, found: list[Read]) -> Iterator[dict[str, Any]]:
    """One a group; bounds and quantiles with their values, as an engine's histogram has them."""
    label, key = ("le", "buckets") if family.kind == "histogram" else ("quantile", "quantiles")
    groups: dict[Labels, dict[str, Any]] = {}
    for series, value, _ in found:
        outer = tuple(pair for pair in series.labels if pair[0] != label)
        group = groups.setdefault(outer, {"labels": plain(outer), key: []})
        end = series.name.removeprefix(family.name)
        if end in ("_count", "_sum"):
            group[end[1:]] = value
        elif (bound := float(dict(series.labels)[label])) != float("inf"):
            group[key].append([bound, value])
    yield from groups.values()
