"""Wire structs of engines' native streams: forward passes, and a rank's load.

KV events become ``block_events.CacheEvents``. Fields have the engines' names.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.protocol.limits import Count, Seconds

Variance = Annotated[float, Meta(ge=0.0, le=1e15)]
"""A variance of numbers of tokens, in tokens squared."""
Duration = Annotated[list[Seconds], Meta(max_length=1)]
"""One duration, or none where it is unknown."""


class ScheduledRequests(msgspec.Struct, array_like=True, gc=False):
    """The requests that one forward pass computes."""

    num_prefill_requests: Count = 0
    sum_prefill_tokens: Count = 0
    var_prefill_length: Variance = 0.0
    sum_prefill_kv_tokens: Count = 0
    num_decode_requests: Count = 0
    sum_decode_kv_tokens: Count = 0
    var_decode_kv_tokens: Variance = 0.0


class QueuedRequests(msgspec.Struct, array_like=True, gc=False):
    """The requests that wait during a forward pass."""

    num_prefill_requests: Count = 0
    sum_prefill_tokens: Count = 0
    var_prefill_length: Variance = 0.0
    num_decode_requests: Count = 0
    sum_decode_kv_tokens: Count = 0
    var_decode_kv_tokens: Variance = 0.0


class Pass(msgspec.Struct, array_like=True, gc=False):
    """A forward pass that computed something."""

    scheduled: ScheduledRequests
    wall_times: Duration = []


class ForwardPass(msgspec.Struct, array_like=True, gc=False, tag="fp"):
    """One record of an engine's forward-pass metrics.

    Attributes:
        ran: The pass that ``scheduled`` describes; ``None``: a keep-alive of an idle engine.
    """

    engine: Count
    stamp: Seconds
    scheduled: ScheduledRequests
    queued: QueuedRequests
    ran: Pass | None = None


class LoadStat(msgspec.Struct, array_like=True, gc=False, tag="ls"):
    """One record of an engine's load; the last two fields count since the previous record."""

    engine: Count
    stamp: Seconds
    running: Count = 0
    waiting: Count = 0
    num_tokens: Count = 0
    max_tokens: Count = 0
    waiting_uncached_tokens: Count = 0
    total_tokens: Count = 0
    max_running: Count = 0
    prefill_uncached_tokens: Count = 0
    prefill_busy_seconds: Seconds = 0.0
