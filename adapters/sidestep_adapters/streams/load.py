"""SGLang's load records: ``["LoadStat", ...]`` of one rank, several times a second."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from sidestep.errors import WireError
from sidestep.protocol.limits import Count
from sidestep.protocol.messages import DECODE_ERRORS
from sidestep_adapters.streams.wire import LoadStat

Total = Annotated[int, Meta(ge=0, le=1 << 62)]
MICROSECOND = 1e-6
MAX_INCREASE = 1 << 40
"""Maximum increase of a total between two records; a larger one is ignored."""


class Totals(NamedTuple):
    """Totals that a publisher counts since its start."""

    prefill_uncached_tokens: int = 0
    prefill_busy_us: int = 0


class LoadReport(NamedTuple):
    """One record: its item, its rank, and its totals, which are not in the item."""

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


def decode(payload: bytes, stamp: float) -> LoadReport:
    """Decode the record in ``payload``, received at ``stamp``."""
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
    return LoadReport(item, found.dp_rank, totals)


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
