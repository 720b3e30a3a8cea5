"""vLLM's dialect."""

from __future__ import annotations

from sidestep.catalog.dialect import ALL_VALUES, KeySeries, Series
from sidestep.catalog.prices import PRICED
from sidestep.engines import shared_rows
from sidestep.engines.dialect import Dialect
from sidestep.engines.vllm import connector_rows, legacy_rows, own_rows, rows
from sidestep.engines.vllm.handlers import COMPUTED, VllmHandlers, availability_counts, kv_capacity
from sidestep.engines.vllm.service_counters import update_service
from sidestep.engines.vllm.wire import NEEDED_BY, VllmRejection, VllmSleep, VllmStep
from sidestep.protocol.block_events import BlockEvents
from sidestep.protocol.cache_lookups import CacheLookups
from sidestep.protocol.request_events import RequestEvents
from sidestep.tracking.requests.outcomes import Outcomes

_CONNECTOR = "a KV connector (--kv-transfer-config) of vLLM"

DIALECT: Dialect = Dialect(
    name="vllm",
    title="vLLM",
    rows=(
        *rows.ROWS,
        *connector_rows.ROWS,
        *own_rows.ROWS,
        *legacy_rows.ROWS,
        *shared_rows.objectives(),
        *shared_rows.lookups(),
    ),
    common_rows=rows.COMMON,
    items=(VllmStep, VllmSleep, VllmRejection, RequestEvents, BlockEvents, CacheLookups),
    structs=(VllmStep, Outcomes),
    handlers=VllmHandlers,
    parallel_samples=("vllm:request_params_n", "vllm:request_max_num_generation_tokens"),
    key_series=KeySeries(
        running=Series("vllm:num_requests_running"),
        waiting=Series("vllm:num_requests_waiting"),
        prompt=Series("vllm:prompt_tokens_by_source_total", "local_compute"),
        generation=Series("vllm:generation_tokens_total"),
        kv_cache_usage=Series("vllm:kv_cache_usage_perc"),
        preemptions=Series("vllm:num_preemptions_total"),
        deferred=Series("vllm:num_requests_waiting_by_reason", "deferred"),
        drafted=Series("vllm:spec_decode_num_draft_tokens_total"),
        accepted=Series("vllm:spec_decode_num_accepted_tokens_total"),
        blocked=Series("vllm:num_requests_waiting_by_reason", "capacity"),
        begun=Series("vllm:time_to_first_token_seconds"),
        slots=Series(shared_rows.MAX_RUNNING_REQUESTS),
        steps=Series("vllm:iteration_tokens_total"),
        finished=(Series("vllm:request_success_total", ALL_VALUES),),
        aborted=(Series("vllm:request_success_total", "abort"),),
        looked_up=(Series("vllm:prefix_cache_queries_total"),),
        found=(Series("vllm:prefix_cache_hits_total"),),
        kv_blocks={
            "kv_lifetime": "vllm:kv_block_lifetime_seconds",
            "kv_idle": "vllm:kv_block_idle_before_evict_seconds",
            "kv_reuse_gap": "vllm:kv_block_reuse_gap_seconds",
        },
    ),
    recorded=(Series("vllm:request_success_total", ALL_VALUES),),
    feature_options={
        "spec_decode": "vLLM's --speculative-config",
        "diffusion": "a diffusion model",
        "kv_cache_metrics": "vLLM's --kv-cache-metrics, or sidestep's tap and --kv.sample-rate above 0",
        "nan_check": "VLLM_COMPUTE_NANS_IN_LOGITS=1 in vLLM's environment",
        "kv_consumer": "a KV connector of vLLM that loads KV (--kv-transfer-config)",
        "watermark": "vLLM's --watermark-config",
        "iteration_details": "vLLM's --enable-logging-iteration-details, or sidestep's tap in its core",
        "engine_core": "sidestep's tap in vLLM's core (--scheduler-cls)",
        "request_events": "the plugin with SIDESTEP_VLLM_MODE=instead, or sidestep's tap",
        PRICED: "the exporter's --prices.model",
        "cudagraph": "vLLM's --cudagraph-metrics",
        "lora": "vLLM's --enable-lora",
        "kv_transfer": _CONNECTOR,
        "kv_offload": _CONNECTOR,
        "nixl": _CONNECTOR,
        "mooncake": _CONNECTOR,
    },
    needed_by=NEEDED_BY,
    latencies={
        "ttft": "vllm:time_to_first_token_seconds",
        "inter_token": "vllm:inter_token_latency_seconds",
        "time_per_output_token": "vllm:request_time_per_output_token_seconds",
        "e2e": "vllm:e2e_request_latency_seconds",
        "queue": "vllm:request_queue_time_seconds",
    },
    computed=COMPUTED,
    availability_counts=availability_counts,
    update_service=update_service,
    kv_capacity=kv_capacity,
)
