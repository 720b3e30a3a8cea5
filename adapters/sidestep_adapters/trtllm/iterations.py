"""Iteration statistics of TensorRT-LLM: families from what one read of ``/metrics`` has taken away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.engines.trtllm.page_rows import RUNNING, USAGE, WAITING
from sidestep.engines.trtllm.rows import CONTEXT_TOKENS, DURATION, LOST, PAUSES, SCHEDULED
from sidestep.errors import PollError
from sidestep.protocol.limits import MAX_OBSERVATIONS, Count
from sidestep.protocol.self_described import Family, Sample

MILLISECONDS = 1000.0
Milliseconds = Annotated[float, Meta(ge=0.0, le=1e9)]


class KvCache(msgspec.Struct, frozen=True):
    """``kvCacheStats``: blocks now."""

    max_blocks: Count = msgspec.field(default=0, name="maxNumBlocks")
    free_blocks: Count = msgspec.field(default=0, name="freeNumBlocks")
    used_blocks: Count = msgspec.field(default=0, name="usedNumBlocks")
    tokens_per_block: Count = msgspec.field(default=0, name="tokensPerBlock")


class Batch(msgspec.Struct, frozen=True):
    """``inflightBatchingStats``."""

    scheduled: Count = msgspec.field(default=0, name="numScheduledRequests")
    context: Count = msgspec.field(default=0, name="numContextRequests")
    generation: Count = msgspec.field(default=0, name="numGenRequests")
    paused: Count = msgspec.field(default=0, name="numPausedRequests")
    context_tokens: Count = msgspec.field(default=0, name="numCtxTokens")


class Iteration(msgspec.Struct):
    """One iteration of one rank."""

    iter: Count = 0
    latency: Milliseconds = msgspec.field(default=0.0, name="iterLatencyMS")
    active: Count = msgspec.field(default=0, name="numActiveRequests")
    queued: Count = msgspec.field(default=0, name="numQueuedRequests")
    most: Count = msgspec.field(default=0, name="maxNumActiveRequests")
    rank: Count | None = msgspec.field(default=None, name="attentionDpRank")
    cache: KvCache | None = msgspec.field(default=None, name="kvCacheStats")
    batch: Batch | None = msgspec.field(default=None, name="inflightBatchingStats")
    suspended: Count | None = msgspec.field(default=None, name="iterSuspendedRequests")


_decoder = msgspec.json.Decoder(Annotated[list[Iteration], Meta(max_length=MAX_OBSERVATIONS)])


def decode(body: bytes) -> list[Iteration]:
    """Decode an answer of ``/metrics``.

    Raises:
        PollError: It has another form.
    """
    try:
        found: list[Iteration] = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise PollError("bad_answer", f"iteration statistics: {error}") from None
    return found


class IterationReader:
    """Turns iterations into families, and remembers the last one of each rank."""

    def __init__(self) -> None:
        self._last: dict[int, Iteration] = {}

    def families(self, iterations: Sequence[Iteration]) -> list[Family]:
        """Return what ``iterations`` add, and the gauges of the last one of rank 0."""
        pauses = lost = 0
        for each in iterations:
            rank = each.rank or 0
            before = self._last.get(rank)
            if before is not None and each.iter > before.iter + 1:
                lost += each.iter - before.iter - 1
            pauses += _pauses(each, before)
            self._last[rank] = each
        batches = [each.batch for each in iterations if each.batch is not None]
        found = [
            Family(name, "histogram", samples=[Sample(observations=list(map(float, values)))])
            for name, values in (
                # Rank 0 stands for all: the ranks of one iteration run together.
                (DURATION, [i.latency / MILLISECONDS for i in iterations if not i.rank]),
                (SCHEDULED, [batch.scheduled for batch in batches]),
                (CONTEXT_TOKENS, [batch.context_tokens for batch in batches]),
            )
        ]
        found += [
            Family(name, "counter", samples=[Sample(value=float(count))])
            for name, count in ((PAUSES, pauses), (LOST, lost))
        ]
        return found

    def gauges(self) -> dict[str, float]:
        """Return gauges of the page by name, as of the last iteration of rank 0."""
        last = self._last.get(0)
        if last is None:
            return {}
        found: dict[str, float] = {
            RUNNING: last.active,
            WAITING: last.queued,
            "trtllm_max_num_active_requests": last.most,
        }
        if last.batch is not None:
            found |= {
                "trtllm_num_scheduled_requests": last.batch.scheduled,
                "trtllm_num_context_requests": last.batch.context,
                "trtllm_num_generation_requests": last.batch.generation,
                "trtllm_num_paused_requests": last.batch.paused,
            }
        cache = last.cache
        if cache is not None:
            found |= {
                "trtllm_kv_cache_max_blocks": cache.max_blocks,
                "trtllm_kv_cache_free_blocks": cache.free_blocks,
                "trtllm_kv_cache_used_blocks": cache.used_blocks,
                "trtllm_kv_cache_tokens_per_block": cache.tokens_per_block,
            }
            if cache.max_blocks:
                found[USAGE] = cache.used_blocks / cache.max_blocks
        return found


def _pauses(each: Iteration, before: Iteration | None) -> int:
    """Return how many requests lost their place: as reported, or the rise of those that are paused."""
    if each.suspended is not None:
        return each.suspended
    now = each.batch.paused if each.batch is not None else 0
    then = before.batch.paused if before is not None and before.batch is not None else 0
    return max(now - then, 0)
