"""SGLang's dialect."""

from __future__ import annotations

from sidestep.catalog.dialect import ALL_VALUES, KeySeries, Series
from sidestep.catalog.row import Sampled
from sidestep.engines import shared_rows
from sidestep.engines.dialect import Dialect
from sidestep.engines.sglang import (
    cache_rows,
    legacy_rows,
    process_rows,
    request_rows,
    rows,
    scheduler_rows,
)
from sidestep.engines.sglang.collectors import SCHEDULER, TOKENIZER
from sidestep.engines.sglang.handlers import SglangHandlers, availability_counts, update_service
from sidestep.engines.sglang.rows import HITS
from sidestep.engines.sglang.wire import SglangRequests, SglangStats
from sidestep.protocol.cache_lookups import CacheLookups

DIALECT: Dialect = Dialect(
    name="sglang",
    title="SGLang",
    rows=(
        *rows.ROWS,
        *scheduler_rows.ROWS,
        *request_rows.ROWS,
        *request_rows.REQUESTS,
        *cache_rows.ROWS,
        *process_rows.ROWS,
        *legacy_rows.ROWS,
        # Schedulers have the queues.
        *shared_rows.saturation(shared=SCHEDULER.shared, mirrored=True),
        *shared_rows.lookups(shared=SCHEDULER.shared),
        *shared_rows.step_limits(Sampled(), Sampled(), shared=SCHEDULER.shared, mirrored=True),
        *shared_rows.backlog(Sampled(), Sampled(), shared=SCHEDULER.shared, mirrored=True),
        shared_rows.uncached_backlog(shared=SCHEDULER.shared, mirrored=True),
        shared_rows.REFUSED_OBSERVATIONS,
        # Every rank reports queue times.
        *shared_rows.objectives(shared=TOKENIZER.shared, extra_labels=True, mirrored=True),
    ),
    common_rows=rows.COMMON,
    items=(SglangStats, SglangRequests, CacheLookups),
    structs=(SglangStats,),
    handlers=SglangHandlers,
    # Priorities have further series of both queues.
    key_series=KeySeries(
        running=Series("sglang:num_running_reqs"),
        waiting=Series("sglang:num_queue_reqs"),
        prompt=Series("sglang:realtime_tokens_total", "prefill_compute"),
        generation=Series("sglang:realtime_tokens_total", "decode"),
        kv_cache_usage=Series("sglang:token_usage"),
        preemptions=Series("sglang:num_retracted_requests_total"),
        begun=Series("sglang:queue_time_seconds"),
        slots=Series(shared_rows.MAX_RUNNING_REQUESTS),
        steps=Series("sglang:cuda_graph_passes_total", ALL_VALUES),
        # A tokenizer counts how requests end, a scheduler all other numbers.
        kv_tokens=Series("sglang:num_used_tokens"),
        kv_capacity=Series("sglang:max_total_num_tokens"),
        finished=(Series("sglang:num_requests_total", ALL_VALUES),),
        aborted=(Series("sglang:num_aborted_requests_total", ALL_VALUES),),
        looked_up=(Series("sglang:prefill_effective_tokens_total", ALL_VALUES),),
        found=tuple(Series("sglang:prefill_effective_tokens_total", mode) for mode in HITS),
    ),
    feature_options={
        "lora": "SGLang's --enable-lora",
        "hicache": "SGLang's --enable-hierarchical-cache",
        "streaming_session": "SGLang's --enable-streaming-session",
    },
    recorded=(Series(request_rows.ENDED_REQUESTS, ALL_VALUES),),
    latencies={
        "ttft": "sglang:time_to_first_token_seconds",
        "inter_token": "sglang:inter_token_latency_seconds",
        "time_per_output_token": "sglang:request_time_per_output_token_seconds",
        "e2e": "sglang:e2e_request_latency_seconds",
        "queue": "sglang:queue_time_seconds",
    },
    availability_counts=availability_counts,
    update_service=update_service,
)
