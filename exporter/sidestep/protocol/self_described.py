"""Families that describe themselves: name, kind, labels and samples in one item."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sidestep.errors import WireError
from sidestep.protocol.engine_totals import NativeBuckets
from sidestep.protocol.limits import (
    COUNT_LIMIT,
    MAX_BOUNDS,
    MAX_FAMILIES,
    MAX_OBSERVATIONS,
    Count,
    Counts,
    FamilyName,
    LabelName,
    Number,
    Observations,
    Seconds,
    Text,
)
from sidestep.protocol.messages import DECODE_ERRORS

EngineIndex = Annotated[int, Meta(ge=0, le=COUNT_LIMIT)]


class Sample(msgspec.Struct, array_like=True, gc=False):
    """One child of a self-described family.

    Attributes:
        labels: Values in the order of the family's ``labels``.
        value: The counter's delta or the gauge's value.
        observations: Values that a histogram or summary observed since the last item.
        counts: Observations whose values are no longer known, by bucket of the family's
            ``bounds``, not cumulative, the last for +Inf.
        total: Sum of the observations in ``counts``.
        weights: Number of times each of ``observations`` was made; empty: once.
        native: The observations in ``counts``, as native buckets.
    """

    labels: Annotated[list[Text], Meta(max_length=16)] = []
    value: Number = 0.0
    observations: Observations = []
    counts: Annotated[list[Count], Meta(max_length=MAX_BOUNDS + 1)] = []
    total: Number = 0.0
    weights: Counts = []
    native: NativeBuckets | None = None


class Family(msgspec.Struct, array_like=True, gc=False):
    """A family that describes itself; ``name`` as exposed, counters with ``_total``."""

    name: FamilyName
    kind: Literal["counter", "gauge", "histogram", "summary"]
    labels: Annotated[list[LabelName], Meta(max_length=16)] = []
    samples: Annotated[list[Sample], Meta(max_length=MAX_OBSERVATIONS)] = []
    help: Annotated[str, Meta(max_length=1024)] = ""
    bounds: Annotated[list[Number], Meta(max_length=MAX_BOUNDS)] = []


class Samples(msgspec.Struct, array_like=True, gc=False, tag="s"):
    """Families outside the plain fields: KV connectors and an engine's own extensions."""

    engine: EngineIndex
    stamp: Seconds
    families: Annotated[list[Family], Meta(max_length=MAX_FAMILIES)] = []


class _Shape(msgspec.Struct, array_like=True, gc=False, tag="s"):
    """A Samples item that is decoded only to count its samples."""

    engine: msgspec.Raw
    stamp: msgspec.Raw
    families: list[_FamilyShape] = []


class _FamilyShape(msgspec.Struct, array_like=True, gc=False):
    name: msgspec.Raw
    kind: msgspec.Raw
    labels: msgspec.Raw = msgspec.Raw()
    samples: Annotated[list[msgspec.Raw], Meta(max_length=MAX_OBSERVATIONS)] = []


SHAPED = 16 << 10
"""Size of an item in bytes from which its samples are counted before they are decoded: a quarter of a
million samples of one byte each took half a second to become objects."""
_shape: msgspec.msgpack.Decoder[_Shape] = msgspec.msgpack.Decoder(_Shape)


def check_sample_count(raw: bytes | memoryview | msgspec.Raw) -> None:
    """Refuse an item with too many samples before they become objects."""
    try:
        families = _shape.decode(raw).families
    except DECODE_ERRORS:
        # Another kind or an invalid value: the reader rejects it.
        return
    if sum(len(family.samples) for family in families) > MAX_OBSERVATIONS:
        raise WireError("too_big", "more samples than an item may have")
