"""SGLang's load: ``["LoadStat", ...]`` of one rank, several times a second."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from sidestep.engines.streams.wire import LoadStat
from sidestep.errors import WireError
from sidestep.protocol.limits import Count
from sidestep.protocol.messages import DECODE_ERRORS

Total = Annotated[int, Meta(ge=0, le=1 << 62)]
MICROSECOND = 1e-6
MAX_INCREASE = 1 << 40
"""What a total may grow by between two records; a sum that grows by more is another's."""


class Totals(NamedTuple):
    """What a publisher counts since it began."""

    prefill_uncached_tokens: int = 0
    prefill_busy_us: int = 0


class Record(NamedTuple):
    """One record: what it says, of which rank, and its totals, which the item has not."""

    item: LoadStat
    rank: int | None
    totals: Totals


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


_decode = msgspec.msgpack.Decoder(_Load).decode


def decode(payload: bytes, stamp: float) -> Record:
    """The record in ``payload``, which came at ``stamp``.

    Raises:
        WireError: Malformed, or beyond a limit.
    """
    try:
        found = _decode(payload)
    except DECODE_ERRORS as error:
        raise WireError("bad_message", str(error)) from None
    item = LoadStat(
        0,
        stamp,
        found.running,
        found.waiting,
        found.num_tokens,
        found.max_tokens,
        found.waiting_uncached_tokens,
        found.total_tokens,
        found.max_running,
    )
    totals = Totals(found.total_prefill_uncached_tokens, found.total_prefill_busy_us)
    return Record(item, found.dp_rank, totals)


def add_increase(item: LoadStat, totals: Totals, before: Totals | None) -> None:
    """Let ``item`` have what ``totals`` grew by since ``before``.

    Where they are less the publisher has begun anew. The first that are heard of are the
    beginning: who knows what they came to before.
    """
    if before is None:
        return
    increase = [
        now - then if now >= then else now for now, then in zip(totals, before, strict=True)
    ]
    if max(increase) <= MAX_INCREASE:
        item.prefill_uncached_tokens = increase[0]
        item.prefill_busy_seconds = increase[1] * MICROSECOND
