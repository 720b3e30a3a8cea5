"""Exemplars: observations of a histogram with the trace of the request that was observed."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
SAMPLED = 1
"""The flag of a trace that its client records; no backend has any other."""


class Exemplar(NamedTuple):
    """One observation: its value, Unix time, and the trace context that the client sent."""

    value: float
    time: float
    trace_id: str
    span_id: str


Exemplars = Mapping[int, Exemplar]
"""The newest exemplar of each bucket that has one, by the bucket's index; never changed in place."""
NO_EXEMPLARS: Exemplars = {}


@functools.lru_cache(maxsize=256)
def recorded_trace(traceparent: str) -> tuple[str, str] | None:
    """Return the ids of trace and span; None if the trace is not recorded.

    Cached, as each request is in several histograms.
    """
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or not int(found[3], 16) & SAMPLED:
        return None
    trace_id, span_id = found[1], found[2]
    return (trace_id, span_id) if int(trace_id, 16) and int(span_id, 16) else None


def exemplar(value: float, time: float, traceparent: str) -> Exemplar | None:
    """Return the exemplar of an observation; None if its trace is not recorded."""
    ids = recorded_trace(traceparent)
    return None if ids is None else Exemplar(value, time, *ids)


def newest(several: Iterable[Exemplars]) -> Exemplars:
    """Return the newest exemplar of each bucket, of histograms with equal bounds."""
    found: dict[int, Exemplar] = {}
    for exemplars in several:
        for bucket, one in exemplars.items():
            known = found.get(bucket)
            if known is None or known.time <= one.time:
                found[bucket] = one
    return found
