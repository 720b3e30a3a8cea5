"""The metrics page as JSON, for programs that would otherwise parse text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from typing import Any

import msgspec

from sidestep.catalog.row import OBSERVED
from sidestep.exposition.engine_values import RegistryValues, Value
from sidestep.exposition.family_series import family_series
from sidestep.exposition.passthrough.families import Sample
from sidestep.exposition.passthrough.parser import Labels, unescape_labels
from sidestep.exposition.passthrough.registry import PassthroughFamily
from sidestep.metrics.histogram import Histogram


def encode(
    values: RegistryValues,
    passthrough: Iterable[PassthroughFamily] = (),
    names: Collection[str] = (),
) -> bytes:
    """Return the page: all families, or those that own one of the sample ``names``."""
    # One family at a time: the encoder keeps other threads from running.
    found = (msgspec.json.encode(family) for family in _families(values, passthrough, names))
    return b"[%b]" % b",".join(found)


def _families(
    values: RegistryValues, passthrough: Iterable[PassthroughFamily], names: Collection[str]
) -> Iterator[dict[str, Any]]:
    for family, series in family_series(values, names):
        samples = [_sample(one.labels, one.value) for one in series]
        if samples:
            yield {
                "name": family.name, "type": family.kind, "help": family.help, "samples": samples,
            }  # fmt: skip
    for passed in passthrough:
        samples = json_samples(passed)
        yield {"name": passed.name, "type": passed.kind, "help": passed.help, "samples": samples}


def _sample(labels: dict[str, str], value: Value) -> dict[str, Any]:
    if not isinstance(value, Histogram):
        return {"labels": labels, "value": value}
    counts = [*accumulate(value.counts)]
    buckets = [[bound, count] for bound, count in zip(value.bounds, counts, strict=False)]
    return {"labels": labels, "buckets": buckets, "count": counts[-1], "sum": value.sum}


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
