"""The metrics page as JSON, for programs that would otherwise parse text."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from typing import Any

import msgspec

from sidestep.exposition.engine_values import RegistryValues, Value
from sidestep.exposition.family_series import Observed, family_series, passed_on, series_of
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
        if series:
            samples = [{"labels": one.labels, **_value(one.value)} for one in series]
            yield _family(family.name, family.kind, family.help, samples)
    for passed in passthrough:
        yield _family(passed.name, passed.kind, passed.help, json_samples(passed))


def _family(name: str, kind: str, text: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "type": kind, "help": text, "samples": samples}


def _value(value: Value) -> dict[str, Any]:
    if not isinstance(value, Histogram):
        return {"value": value}
    counts = [*accumulate(value.counts)]
    buckets = [[bound, count] for bound, count in zip(value.bounds, counts, strict=False)]
    return {"buckets": buckets, "count": counts[-1], "sum": value.sum}


def json_samples(family: PassthroughFamily) -> list[dict[str, Any]]:
    """Return the samples of a family as JSON objects, histograms in the form of an engine's."""
    key = "buckets" if family.kind == "histogram" else "quantiles"
    found = []
    for one in series_of(passed_on(family)):
        value = one.value
        own: dict[str, Any] = {"value": value}
        if isinstance(value, Observed):
            bounded = [[bound, count] for bound, count in value.bounded if bound != math.inf]
            own = {key: bounded, "count": value.count, "sum": value.total}
        elif one.stamp is not None:
            own["timestamp"] = one.stamp / 1000
        found.append({"labels": dict(one.labels), **own})
    return found
