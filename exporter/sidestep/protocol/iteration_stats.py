"""Statistics of one engine step under vLLM's own names: tokens, latencies, finished requests, KV blocks.

vLLM's stat logger has these objects; without it ``tracking`` derives them from raw events.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.protocol.limits import MAX_STRUCTS, Count, Counts, Number, Observations

FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
"""vLLM's ``FinishReason``, an IntEnum: its members in order."""


class Run(msgspec.Struct, array_like=True, gc=False):
    """An observation that was made ``count`` times.

    Observations are in a list field, in the field of the same name with ``_runs``, or in both.
    """

    value: Number = 0.0
    count: Count = 0


class KVCacheEvictionEvent(msgspec.Struct, array_like=True, gc=False):
    """A sampled block that was reallocated; times in seconds."""

    lifetime_seconds: Number = 0.0
    idle_seconds: Number = 0.0
    reuse_gaps_seconds: Annotated[list[Number], Meta(max_length=64)] = []


class PromptTokenStats(msgspec.Struct, array_like=True, gc=False):
    """Prompt tokens of requests with their first output, by origin of their KV."""

    computed: Count = 0
    local_cache_hit: Count = 0
    external_kv_transfer: Count = 0
    cached_tokens: Count = 0
    total: Count = 0


class FinishedRequestStats(msgspec.Struct, array_like=True, gc=False):
    """A request that finished; intervals in seconds. It has no id, since ids are the users'."""

    finish_reason: Count = 0
    e2e_latency: Number | None = None
    num_prompt_tokens: Count | None = None
    num_preemptions: Count | None = None
    num_generation_tokens: Count | None = None
    max_tokens_param: Count | None = None
    queued_time: Number | None = None
    prefill_time: Number | None = None
    inference_time: Number | None = None
    decode_time: Number | None = None
    mean_time_per_output_token: Number | None = None
    is_corrupted: bool = False
    num_cached_tokens: Annotated[int, Meta(ge=-1, le=1 << 40)] | None = None

    @property
    def num_prefill_kv_computed_tokens(self) -> int | None:
        """Prompt tokens whose KV was not cached; vLLM marks an unknown cache hit with -1."""
        if self.num_prompt_tokens is None or self.num_cached_tokens is None:
            return None
        return self.num_prompt_tokens - max(self.num_cached_tokens, 0)

    @property
    def max_tokens_limit(self) -> int | None:
        """``max_tokens_param`` where the request set one; the engine skips 0 as well."""
        return self.max_tokens_param or None


class IterationStats(msgspec.Struct, array_like=True, gc=False):
    """Tokens and latencies of the step, for the requests of one front end."""

    num_generation_tokens: Count = 0
    prompt_token_stats: PromptTokenStats | None = None
    num_prompt_tokens: Count = 0
    num_preempted_reqs: Count = 0
    finished_requests: Annotated[list[FinishedRequestStats], Meta(max_length=MAX_STRUCTS)] = []
    max_num_generation_tokens_iter: Counts = []
    n_params_iter: Counts = []
    time_to_first_tokens_iter: Observations = []
    inter_token_latencies_iter: Observations = []
    num_corrupted_reqs: Count = 0
    num_watermarked_reqs: Count = 0
    num_watermark_skipped_reqs: Count = 0
    num_not_watermarked_reqs: Count = 0
    inter_token_latencies_iter_runs: Annotated[list[Run], Meta(max_length=MAX_STRUCTS)] = []

    @property
    def prompt_tokens(self) -> int:
        """All prompt tokens; releases before the split by source count only these."""
        stats = self.prompt_token_stats
        return self.num_prompt_tokens if stats is None else stats.total

    @property
    def iteration_tokens(self) -> int:
        """Tokens computed in the step: generated ones and prompt tokens that missed the cache."""
        stats = self.prompt_token_stats
        computed = self.num_prompt_tokens if stats is None else stats.computed
        return computed + self.num_generation_tokens
