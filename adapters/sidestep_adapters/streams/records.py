"""Records of two streams, of which each stands for itself.

Forward-pass metrics have one record for each forward pass of SGLang, or of vLLM under Dynamo: both
send the same map, and fields of later versions are ignored. SGLang's load records are
``["LoadStat", ...]`` of one rank, several times a second.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from sidestep.errors import WireError
from sidestep.protocol.limits import Count, Seconds
from sidestep.protocol.messages import DECODE_ERRORS
from sidestep_adapters.streams.wire import (
    ForwardPass,
    LoadStat,
    Pass,
    QueuedRequests,
    ScheduledRequests,
)

VERSION = 1


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


_decode_record = msgspec.msgpack.Decoder(_Record).decode


def decode_forward_pass(payload: bytes, stamp: float) -> tuple[ForwardPass, int | None]:
    """Return the item and the rank of the record in ``payload``, received at ``stamp``."""
    try:
        found = _decode_record(payload)
    except DECODE_ERRORS as error:
        raise WireError("bad_message", str(error)) from None
    if found.version != VERSION:
        raise WireError("version", "forward-pass metrics of another version")
    scheduled, wall_time = found.scheduled_requests, found.wall_time
    item = ForwardPass(0, stamp, scheduled, found.queued_requests)
    if wall_time or scheduled.num_prefill_requests or scheduled.num_decode_requests:
        # Dynamo's first pass after an idle period has no wall time.
        item.ran = Pass(scheduled, [wall_time] if wall_time else [])
    return item, found.dp_rank


Total = Annotated[int, Meta(ge=0, le=1 << 62)]
MICROSECOND = 1e-6
MAX_INCREASE = 1 << 40
"""Maximum increase of a total between two records; a larger one is ignored."""


class Totals(NamedTuple):
    """Totals that a publisher counts since its start."""

    prefill_uncached_tokens: int = 0
    prefill_busy_us: int = 0


class _Load(msgspec.Struct, array_like=True, gc=False, tag="LoadStat"):
    running: Count
    waiting: Count
    num_tokens: Count
    max_tokens: Count
    dp_rank: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None
    waiting_uncached_tokens: Count = 0
    total_tokens: Count = 0
    max_running: Count = 0
    total_prefill_uncached_tokens: Total = 0
    total_prefill_busy_us: Total = 0


_SAME = set(_Load.__struct_fields__) & set(LoadStat.__struct_fields__)
_decode_load = msgspec.msgpack.Decoder(_Load).decode


def decode_load(payload: bytes, stamp: float) -> tuple[LoadStat, int | None, Totals]:
    """Return the item, the rank and the totals, which are not in the item, of a record."""
    try:
        found = _decode_load(payload)
    except DECODE_ERRORS as error:
        raise WireError("bad_message", str(error)) from None
    item = LoadStat(0, stamp, **{name: getattr(found, name) for name in _SAME})
    totals = Totals(found.total_prefill_uncached_tokens, found.total_prefill_busy_us)
    return item, found.dp_rank, totals


def add_increase(item: LoadStat, totals: Totals, before: Totals | None) -> None:
    """Add to ``item`` the increase of ``totals`` since ``before``.

    Smaller totals are those of a restarted publisher. Without previous totals nothing is added:
    the first ones received are the baseline.
    """
    if before is None:
        return
    increase = [
        now - then if now >= then else now for now, then in zip(totals, before, strict=True)
    ]
    if max(increase) <= MAX_INCREASE:
        item.prefill_uncached_tokens = increase[0]
        item.prefill_busy_seconds = increase[1] * MICROSECOND
