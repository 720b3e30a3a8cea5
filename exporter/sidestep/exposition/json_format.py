"""The metrics page as JSON, for programs that would otherwise parse text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from typing import Any

import msgspec

from sidestep.exposition import passthrough_text
from sidestep.exposition.engine_values import RegistryValues, Value
from sidestep.exposition.family_series import family_series
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
        samples = passthrough_text.json_samples(passed)
        yield {"name": passed.name, "type": passed.kind, "help": passed.help, "samples": samples}


def _sample(labels: dict[str, str], value: Value) -> dict[str, Any]:
    if not isinstance(value, Histogram):
        return {"labels": labels, "value": value}
    counts = [*accumulate(value.counts)]
    buckets = [[bound, count] for bound, count in zip(value.bounds, counts, strict=False)]
    return {"labels": labels, "buckets": buckets, "count": counts[-1], "sum": value.sum}
