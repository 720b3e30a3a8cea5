"""Items: what a stream carries about an engine. Every item names its engine.

``engine`` is an index into the ``engines`` of the stream's last Hello; ``stamp``
is the sender's host-monotonic clock in seconds, by which gauges are ordered.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sidestep.engines.sglang import wire as sglang
from sidestep.engines.streams.wire import ForwardPass, LoadStat
from sidestep.engines.triton.wire import TritonStats
from sidestep.engines.vllm.wire import CacheStats, IterationStats, SchedulerStats
from sidestep.errors import WireError
from sidestep.protocol.block_events import BlockEvents, CacheEvents
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
from sidestep.protocol.native_buckets import NativeBuckets
from sidestep.protocol.request_events import RequestEvents

EngineIndex = Annotated[int, Meta(ge=0, le=COUNT_LIMIT)]


class VllmStep(msgspec.Struct, array_like=True, gc=False, tag="vs"):
    """One call of vLLM's stat logger: what one front end saw of one engine step.

    ``scheduler`` is present in one front end per step, ``iteration`` where the
    step had output for this front end's requests. ``more`` marks what did not
    fit into the step's item: observations only, none of its counts or gauges.
    """

    engine: EngineIndex
    stamp: Seconds
    wall: Seconds
    scheduler: SchedulerStats | None = None
    iteration: IterationStats | None = None
    mm_cache: CacheStats | None = None
    more: bool = False


class VllmSleep(msgspec.Struct, array_like=True, gc=False, tag="vz"):
    """The engine fell asleep (``sleep`` 1, at ``level`` 1 or 2) or woke up."""

    engine: EngineIndex
    stamp: Seconds
    sleep: Annotated[int, Meta(ge=0, le=1)] = 0
    level: Annotated[int, Meta(ge=0, le=16)] = 0


class VllmRejection(msgspec.Struct, array_like=True, gc=False, tag="vr"):
    """The front end turned a request away before the engine saw it."""

    engine: EngineIndex
    stamp: Seconds
    reason: Text


class SglangStats(msgspec.Struct, array_like=True, gc=False, tag="gs"):
    """One report of an SGLang scheduler's state: gauges only, its counters come as samples."""

    engine: EngineIndex
    stamp: Seconds
    wall: Seconds
    stats: sglang.SchedulerStats


class Sample(msgspec.Struct, array_like=True, gc=False):
    """One child of a self-described family.

    Attributes:
        labels: Values in the order of the family's ``labels``.
        value: The counter's delta or the gauge's value.
        observations: What a histogram or summary has seen since the last item.
        counts: The same where the single values are no longer known: how many
            fell into each bucket of the family's ``bounds``, not cumulative,
            those above the last bound at the end.
        total: The sum of the values that ``counts`` stands for.
        weights: How often each of ``observations`` was seen; empty: once.
        native: What ``counts`` stands for, in native buckets as well.
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


Item = (
    VllmStep
    | VllmSleep
    | VllmRejection
    | SglangStats
    | Samples
    | RequestEvents
    | BlockEvents
    | CacheEvents
    | ForwardPass
    | LoadStat
    | TritonStats
)


class _Shape(msgspec.Struct, array_like=True, gc=False, tag="s"):
    """A Samples item of which nothing is read but how many samples it has."""

    engine: msgspec.Raw
    stamp: msgspec.Raw
    families: list[_FamilyShape] = []


class _FamilyShape(msgspec.Struct, array_like=True, gc=False):
    name: msgspec.Raw
    kind: msgspec.Raw
    labels: msgspec.Raw = msgspec.Raw()
    samples: Annotated[list[msgspec.Raw], Meta(max_length=MAX_OBSERVATIONS)] = []


SHAPED = 16 << 10
"""Bytes from which on samples are counted first: a quarter of a million of one byte each
took half a second to become objects."""

_shape: msgspec.msgpack.Decoder[_Shape] = msgspec.msgpack.Decoder(_Shape)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Item] = msgspec.msgpack.Decoder(Item)


def encode_item(item: Item) -> bytes:
    """The bytes of ``item``, to be placed in a Batch."""
    return _encoder.encode(item)


def decode_item(raw: bytes | memoryview | msgspec.Raw) -> Item:
    """The item in ``raw``.

    Raises:
        WireError: Malformed, or beyond a limit.
    """
    try:
        if len(raw) > SHAPED:
            _check_shape(raw)
        return _decoder.decode(raw)
    except DECODE_ERRORS as error:
        raise WireError("bad_item", str(error)) from None


def _check_shape(raw: bytes | memoryview | msgspec.Raw) -> None:
    try:
        families = _shape.decode(raw).families
    except DECODE_ERRORS:
        # Another kind, or nonsense: whoever reads it says so.
        return
    if sum(len(family.samples) for family in families) > MAX_OBSERVATIONS:
        raise WireError("too_big", "more samples than an item may have")
