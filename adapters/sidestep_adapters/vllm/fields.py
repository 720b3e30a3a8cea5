"""The fields that are read from vLLM's stats, by release; 0.11.1 to 0.33.0 were compared."""

from __future__ import annotations

from sidestep.engines.vllm.wire import CacheStats, SchedulerStats
from sidestep.protocol.iteration_stats import IterationStats
from sidestep_adapters.publisher.field_check import Fields

_LOOKED_UP = "requests", "queries", "hits"

FIELDS = Fields(
    parts={"scheduler": SchedulerStats, "iteration": IterationStats, "mm_cache": CacheStats},
    since={
        "scheduler.kv_cache_eviction_events": "0.12",
        "scheduler.cudagraph_stats": "0.13",
        "iteration.finished_requests.num_cached_tokens": "0.13",
        "scheduler.perf_stats": "0.14",
        "iteration.prompt_token_stats": "0.16",
        "scheduler.num_skipped_waiting_reqs": "0.20",
        "scheduler.spec_decoding_stats.num_draft_tokens_per_pos": "0.25",
        "scheduler.iteration_details": "0.26",
        "iteration.finished_requests.num_preemptions": "0.31",
        "scheduler.num_kv_fetch_reqs_by_stage": "0.32",
        "scheduler.connector_prefix_cache_stats.hits_by_source": "0.32",
        "iteration.num_watermarked_reqs": "0.32",
        "iteration.num_watermark_skipped_reqs": "0.32",
        "iteration.num_not_watermarked_reqs": "0.32",
    },
    # The total of prompt tokens is in the stats by source as well.
    substitutes={"iteration.num_prompt_tokens": "prompt_token_stats"},
    unread={
        # Made here.
        "scheduler.diffusion_stats",
        "iteration.inter_token_latencies_iter_runs",
        # Of other caches than the external one.
        "scheduler.prefix_cache_stats.hits_by_source",
        "mm_cache.hits_by_source",
        *(f"mm_cache.preempted_{name}" for name in _LOOKED_UP),
    },
    # Before, these requests are among the others that wait.
    implied={"scheduler.num_skipped_waiting_reqs"},
)
"""Where a field came between two compared releases, the later one counts as its first."""
