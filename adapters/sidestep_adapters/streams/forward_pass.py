"""Forward-pass metrics: one record for each forward pass of SGLang, or of vLLM under Dynamo.

Both send the same map. Fields of later versions are ignored.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from sidestep.errors import WireError
from sidestep.protocol.limits import Count, Seconds
from sidestep.protocol.messages import DECODE_ERRORS
from sidestep_adapters.streams.wire import ForwardPass, Pass, QueuedRequests, ScheduledRequests

VERSION = 1


class ForwardPassReport(NamedTuple):
    """One record: its item and its rank."""

    item: ForwardPass
    rank: int | None


class _Scheduled(ScheduledRequests, array_like=False, gc=False):
    pass


class _Queued(QueuedRequests, array_like=False, gc=False):
    pass


class _Record(msgspec.Struct, gc=False):
    scheduled_requests: _Scheduled
    wall_time: Seconds
    version: Count = VERSION
    dp_rank: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None
    queued_requests: _Queued = msgspec.field(default_factory=_Queued)


_decode = msgspec.msgpack.Decoder(_Record).decode


def decode(payload: bytes, stamp: float) -> ForwardPassReport:
    """Decode the record in ``payload``, received at ``stamp``."""
    try:
        found = _decode(payload)
    except DECODE_ERRORS as error:
        raise WireError("bad_message", str(error)) from None
    if found.version != VERSION:
        raise WireError("version", "forward-pass metrics of another version")
    scheduled, wall_time = found.scheduled_requests, found.wall_time
    item = ForwardPass(0, stamp, scheduled, found.queued_requests)
    if wall_time or scheduled.num_prefill_requests or scheduled.num_decode_requests:
        # Dynamo's first pass after an idle period has no wall time.
        item.ran = Pass(scheduled, [wall_time] if wall_time else [])
    return ForwardPassReport(item, found.dp_rank)
