"""Items: the updates of an engine that a stream carries.

In every item, ``engine`` is an index into the ``engines`` of the stream's last Hello, and ``stamp``
is the sender's host-monotonic clock in seconds, which orders gauges.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.engines.sglang import wire as sglang
from sidestep.engines.streams.wire import ForwardPass, LoadStat
from sidestep.engines.triton.wire import TritonStats
from sidestep.engines.vllm.wire import CacheStats, SchedulerStats
from sidestep.errors import WireError
from sidestep.protocol.block_events import BlockEvents, CacheEvents
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import Seconds, Text
from sidestep.protocol.messages import DECODE_ERRORS
from sidestep.protocol.request_events import RequestEvents
from sidestep.protocol.self_described import SHAPED, EngineIndex, Samples, check_sample_count


class VllmStep(msgspec.Struct, array_like=True, gc=False, tag="vs"):
    """One call of vLLM's stat logger: one engine step as one front end sees it.

    ``scheduler`` is present in one front end per step, ``iteration`` where the step had output for
    requests of this front end. ``more`` marks the rest of a step that did not fit into one item: it
    has observations only, no counts or gauges.
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
    """The front end rejected a request before it reached the engine."""

    engine: EngineIndex
    stamp: Seconds
    reason: Text


class SglangStats(msgspec.Struct, array_like=True, gc=False, tag="gs"):
    """One report of an SGLang scheduler's state: gauges only; its counters arrive as Samples."""

    engine: EngineIndex
    stamp: Seconds
    wall: Seconds
    stats: sglang.SchedulerStats


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


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Item] = msgspec.msgpack.Decoder(Item)


def encode_item(item: Item) -> bytes:
    """Encode ``item`` for a Batch."""
    return _encoder.encode(item)


def decode_item(raw: bytes | memoryview | msgspec.Raw) -> Item:
    """Decode the item in ``raw``.

    Raises:
        WireError: The item is malformed or exceeds a limit.
    """
    try:
        if len(raw) > SHAPED:
            check_sample_count(raw)
        return _decoder.decode(raw)
    except DECODE_ERRORS as error:
        raise WireError("bad_item", str(error)) from None
