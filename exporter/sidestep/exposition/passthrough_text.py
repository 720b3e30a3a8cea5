"""Passthrough families as text and JSON; they follow the engines' families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sidestep.catalog.model import OBSERVED
from sidestep.exposition.passthrough.families import Sample
from sidestep.exposition.passthrough.parser import Labels, timestamp_in_seconds, unescape_labels
from sidestep.exposition.passthrough.registry import PassthroughFamily
from sidestep.exposition.text_format import header


def write(families: Iterable[PassthroughFamily], *, openmetrics: bool = False) -> list[bytes]:
    """Return the families as text."""
    parts: list[bytes] = []
    for family in families:
        if openmetrics and not family.is_openmetrics:
            continue
        parts.append(_header(family, openmetrics=openmetrics).encode())
        shown = timestamp_in_seconds if openmetrics else bytes
        lines = [b"%b %b\n" % (series.text, shown(value)) for series, value in family.samples]
        parts.append(b"".join(lines))
    return parts


def _header(family: PassthroughFamily, *, openmetrics: bool) -> str:
    kind: str = family.kind
    # OpenMetrics requires the suffix _total of counters, and calls untyped "unknown".
    if openmetrics and (kind == "untyped" or not _has_openmetrics_counter_name(family)):
        kind = "unknown"
    return header(family.name, kind, family.help, openmetrics=openmetrics)


def _has_openmetrics_counter_name(family: PassthroughFamily) -> bool:
    return family.kind != "counter" or family.name.endswith("_total")


def json_samples(family: PassthroughFamily) -> list[dict[str, Any]]:
    """Return the samples of a family as JSON objects."""
    samples = family.samples
    if family.kind in OBSERVED:
        return _grouped_samples(family, samples)
    return [*_plain_samples(samples)]


def _number(text: bytes) -> float:
    return int(text) if text.isdigit() else float(text)


def _plain_samples(samples: Iterable[Sample]) -> Iterator[dict[str, Any]]:
    for series, text in samples:
        value, _, stamp = text.partition(b" ")
        time = {"timestamp": int(stamp) / 1000} if stamp else {}
        yield {"labels": unescape_labels(series.labels), "value": _number(value), **time}


def _grouped_samples(family: PassthroughFamily, samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """Return one sample per histogram or summary, in the form of an engine's histogram."""
    label, key = ("le", "buckets") if family.kind == "histogram" else ("quantile", "quantiles")
    groups: dict[Labels, dict[str, Any]] = {}
    for series, text in samples:
        value = _number(text.partition(b" ")[0])
        outer = tuple(pair for pair in series.labels if pair[0] != label)
        group = groups.setdefault(outer, {"labels": unescape_labels(outer), key: []})
        end = series.name.removeprefix(family.name)
        if end in ("_count", "_sum"):
            group[end[1:]] = value
        elif (bound := float(dict(series.labels)[label])) != float("inf"):
            group[key].append([bound, value])
    return [*groups.values()]
