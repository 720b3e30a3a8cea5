"""Forward-pass metrics: one record for each forward pass of SGLang, Dynamo's vLLM, or vLLM.

All share one schema, which is sent as a map with field names, or as an array in the same order. vLLM's
form (vllm-project/vllm#52061, open) has one more field, which names what was timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from sidestep.errors import WireError
from sidestep.protocol.limits import Count, Seconds
from sidestep.protocol.messages import DECODE_ERRORS
from sidestep_adapters.streams.wire import ForwardPass, Pass, QueuedRequests, ScheduledRequests

VERSION = 1

Rank = Annotated[int, Meta(ge=0, le=1 << 16)]
Skipped = msgspec.Raw


class ForwardPassReport(NamedTuple):
    """One record: its item and its rank."""

    item: ForwardPass
    rank: int | None


class _Scheduled(ScheduledRequests, array_like=False, gc=False):
    pass


class _Queued(QueuedRequests, array_like=False, gc=False):
    pass


class _Map(msgspec.Struct, gc=False):
    scheduled_requests: _Scheduled
    wall_time: Seconds
    version: Count = VERSION
    dp_rank: Rank | None = None
    queued_requests: _Queued = msgspec.field(default_factory=_Queued)


class _Array(msgspec.Struct, array_like=True, gc=False):
    version: Count
    worker_id: Skipped
    dp_rank: Rank
    counter_id: Skipped
    wall_time: Seconds
    scheduled_requests: ScheduledRequests
    queued_requests: QueuedRequests


class _TimedArray(msgspec.Struct, array_like=True, gc=False):
    version: Count
    worker_id: Skipped
    dp_rank: Rank
    counter_id: Skipped
    timing_scope: Skipped
    wall_time: Seconds
    scheduled_requests: ScheduledRequests
    queued_requests: QueuedRequests


_Form = _Map | _Array | _TimedArray
_decoders: Sequence[msgspec.msgpack.Decoder[Any]] = [
    msgspec.msgpack.Decoder(form) for form in (_Map, _Array, _TimedArray)
]


def decode(payload: bytes, stamp: float) -> ForwardPassReport:
    """Decode the record in ``payload``, received at ``stamp``.

    Raises:
        WireError: Malformed, beyond a limit, or of another version.
    """
    for decoder in _decoders:
        try:
            found = decoder.decode(payload)
        except DECODE_ERRORS:
            continue
        if found.version != VERSION:
            raise WireError("version", "forward-pass metrics of another version")
        return ForwardPassReport(_item(found, stamp), found.dp_rank)
    raise WireError("bad_message", "no forward-pass metrics")


def _item(found: _Form, stamp: float) -> ForwardPass:
    scheduled, wall_time = found.scheduled_requests, found.wall_time
    item = ForwardPass(0, stamp, scheduled, found.queued_requests)
    if wall_time or scheduled.num_prefill_requests or scheduled.num_decode_requests:
        # Dynamo's first pass after an idle period has no wall time.
        item.ran = Pass(scheduled, [wall_time] if wall_time else [])
    return item
