"""The limit that keeps a vLLM scheduler from admitting the next waiting request; needs no vLLM itself.

After each call of ``schedule()`` the reader finds in the scheduler's state where its loop over the
waiting requests has stopped. Reading it takes constant time, because this runs on the thread of the engine's step.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Any

from sidestep.protocol.request_events import LIMITS

log = logging.getLogger(__name__)

NONE, SLOTS, TOKENS, KV_BLOCKS, LORA, GRAMMAR, KV_TRANSFER, ENCODER, DEFERRED, PAUSED = range(
    len(LIMITS)
)
BLOCKED = {
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": GRAMMAR,
    "WAITING_FOR_FSM": GRAMMAR,
    "WAITING_FOR_REMOTE_KVS": KV_TRANSFER,
}
"""Limits by vLLM's name of the state of a request that its scheduler passes over."""
PAUSED_ALL = 2


class LimitReader:
    """Reader of one scheduler's limits, in the order in which its loop meets them.

    Args:
        scheduler: A scheduler of vLLM, before its first step; no reference is kept.

    Attributes:
        is_usable: Whether this release has all attributes that are read; if not, limits are unknown.
    """

    def __init__(self, scheduler: Any) -> None:
        self.is_usable = True
        self._has_preempted = False
        lora, speculative, scheduling = (
            getattr(scheduler.vllm_config, f"{name}_config", None)
            for name in ("lora", "speculative", "scheduler")
        )
        self._max_loras = getattr(lora, "max_loras", 0)
        self._draft_slots = getattr(speculative, "max_num_new_slots_for_drafting", 0)
        self._max_input = getattr(scheduling, "max_num_batched_tokens", 0)
        self._is_chunked = getattr(scheduling, "enable_chunked_prefill", True)
        # In the order of the loop; older releases have the last one alone.
        queues = ("kv_holding_waiting", "skipped_waiting", "waiting")
        self._queues = [name for name in queues if hasattr(scheduler, name)]
        self._max_running = (
            "max_num_active_reqs"
            if hasattr(scheduler, "max_num_active_reqs")
            else "max_num_running_reqs"
        )
        # Without these, a loop that has slots and tokens left has stopped for want of blocks.
        self._has_other_shortages = (
            not self._is_chunked
            or getattr(scheduler, "need_mamba_block_aligned_split", False)
            or getattr(scheduler, "max_num_encoder_input_tokens", 0) > 0
        )
        self._has_connector = getattr(scheduler, "connector", None) is not None
        self._adapters: dict[str, int] = {}
        self._loaded: Counter[int] = Counter()

    def started(self) -> None:
        """Note that a call of ``schedule()`` begins."""
        self._has_preempted = False

    def preempted(self, request: Any) -> None:
        """Note that a request has left the batch for the queue."""
        self._has_preempted = True
        self.left(request)

    def left(self, request: Any) -> None:
        """Note that a request has left the scheduler, or the batch."""
        if self._adapters and (adapter := self._adapters.pop(request.request_id, None)) is not None:
            self._loaded[adapter] -= 1
            if not self._loaded[adapter]:
                del self._loaded[adapter]

    def read(self, scheduler: Any, batch: Any, *, is_throttled: bool = False) -> int | None:
        """Return the index in ``LIMITS`` of the limit after a call of ``schedule()``; None: unknown.

        Args:
            scheduler: The scheduler.
            batch: What it has scheduled.
            is_throttled: Whether it was asked to leave prefills to a later step.
        """
        if not self.is_usable:
            return None
        try:
            if self._max_loras:
                self._join(scheduler, batch)
            return self._limit(scheduler, batch, is_throttled)
        except Exception:  # an exception here kills the engine
            self.is_usable = False
            log.warning("sidestep: this release's limits cannot be read", exc_info=True)
            return None

    def _join(self, scheduler: Any, batch: Any) -> None:
        """Count the adapters of the requests that have joined the batch."""
        resumed = batch.scheduled_cached_reqs.resumed_req_ids
        if not batch.scheduled_new_reqs and not resumed:
            return
        for name in (*(new.req_id for new in batch.scheduled_new_reqs), *resumed):
            adapter = scheduler.requests[name].lora_request
            if adapter is not None and name not in self._adapters:
                self._adapters[name] = adapter.lora_int_id
                self._loaded[adapter.lora_int_id] += 1

    def _limit(  # noqa: C901, PLR0911 - one test after the other, as in the scheduler's loop
        self, scheduler: Any, batch: Any, is_throttled: bool
    ) -> int:
        running = len(scheduler.running)
        # Lengths of a dictionary and a list take less time than those of vLLM's queues.
        others = len(scheduler.requests) - running
        if not others:
            return NONE
        # Sessions wait for their clients.
        sessions = getattr(scheduler, "num_waiting_for_streaming_input", 0)
        if others <= sessions or (self._has_connector and not self._count(scheduler) > sessions):
            return NONE
        state = getattr(scheduler, "pause_state", 0)
        if state and (state >= PAUSED_ALL or scheduler.waiting):
            return PAUSED
        if self._has_preempted:
            # The scheduler admits nobody in a step that has preempted a request.
            return KV_BLOCKS
        if running + sessions >= getattr(scheduler, self._max_running):
            return SLOTS
        left = scheduler.max_num_scheduled_tokens - batch.total_num_scheduled_tokens
        if self._draft_slots:
            drafts = self._draft_slots * (len(batch.num_scheduled_tokens) + 1)
            left = min(left, self._max_input - batch.total_num_scheduled_tokens - drafts)
        if left <= 0:
            return TOKENS
        if self._has_passed_over_all(scheduler, others):
            limit = self._condition(scheduler, self._next(scheduler))
            if limit is not None:
                return limit
        elif is_throttled and not getattr(scheduler, "prefill_capacity_bound", True):
            return DEFERRED
        if self._has_other_shortages:
            return self._shortage(scheduler, self._next(scheduler), left)
        return KV_BLOCKS

    def _count(self, scheduler: Any) -> int:
        """Return how many requests wait; those of a connector may have ended and remain known."""
        return sum(len(getattr(scheduler, name)) for name in self._queues)

    def _next(self, scheduler: Any) -> Any:
        """Return the first request in the order of the scheduler's loop."""
        for name in self._queues:
            queue = getattr(scheduler, name)
            # vLLM's own methods of a queue are much slower than those of a deque.
            if deque.__len__(queue) if isinstance(queue, deque) else queue:
                return queue[0] if isinstance(queue, deque) else queue.peek_request()
        raise LookupError("no request waits")

    def _has_passed_over_all(self, scheduler: Any, others: int) -> bool:
        """Return whether the loop has passed over all waiting requests; True where that is unknown."""
        passed_over = getattr(scheduler, "deferred_waiting", None)
        if passed_over is None:
            return len(self._queues) == 1 or not scheduler.waiting
        if self._has_connector:
            others = self._count(scheduler)
        return others <= len(passed_over)

    def _condition(self, scheduler: Any, request: Any) -> int | None:
        """Return what a request that was passed over waits for; None: for memory or tokens, after all.

        Releases count a request as passed over until it is admitted, also if what it has waited for
        came earlier.
        """
        blocked = BLOCKED.get(request.status.name)
        if blocked is not None:
            return blocked
        adapter, loaded = request.lora_request, self._loaded
        is_full = len(loaded) >= self._max_loras > 0
        if is_full and adapter is not None and adapter.lora_int_id not in loaded:
            return LORA
        if getattr(request, "num_stale_output_tokens", 0) and not request.drop_stale_output:
            return DEFERRED
        if getattr(scheduler, "ec_connector", None) is not None and request.mm_features:
            return ENCODER
        # A connector has not said yet how many tokens it has; older releases do not tell that from a shortage.
        is_asked = self._has_connector and len(self._queues) > 1 and not request.num_computed_tokens
        return KV_TRANSFER if is_asked and not request.num_preemptions else None

    def _shortage(self, scheduler: Any, request: Any, left: int) -> int:
        """Return what the scheduler had too little of for ``request``, at which its loop has stopped."""
        if not self._is_chunked and request.num_tokens - request.num_computed_tokens > left:
            return TOKENS
        block = scheduler.block_size
        if getattr(scheduler, "need_mamba_block_aligned_split", False) and left < block:
            return TOKENS
        if getattr(request, "has_encoder_inputs", False):
            groups = len(scheduler.kv_cache_config.kv_cache_groups)
            needed = -(-request.num_tokens // block) * groups
            if needed <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks():
                return ENCODER
        return KV_BLOCKS
