"""Rows of vLLM's families that are sent self-described (0.33): KV connectors and the front end.

Each connector has its own payload, which ``sidestep_adapters.vllm.connectors`` translates.
``feature`` is set for connectors whose series the engine creates before their first data. The
families are those of 0.32 and 0.33; ``since`` marks those that 0.32 lacks.
"""

from __future__ import annotations

import dataclasses
import re

from sidestep.catalog.row import Kind, Row, Sampled
from sidestep.engines.row_builders import SampledRows

TRANSFER_TYPES = ("CPU_to_GPU", "GPU_to_CPU")
"""Directions of the deprecated offload families: loads, then stores."""

_POST_SECONDS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0,
)  # fmt: skip
_TRANSFER_SECONDS = _POST_SECONDS[1:]
_FILE_SECONDS = _POST_SECONDS
_STORE_SECONDS = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0,
)  # fmt: skip
_PROMOTION_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_SYNC_LOOKUP_SECONDS = (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0)
_ASYNC_LOOKUP_SECONDS = (1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
_OPERATION_SECONDS = (0.01, 0.1, 1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SESSION_SECONDS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_TRANSFER_BYTES = tuple(float(2**power) for power in range(11, 34, 2))
_OFFLOAD_BYTES = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
_DESCRIPTORS = (
    10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0, 1000.0, 2000.0, 4000.0, 10000.0, 20000.0,
    50000.0,
)  # fmt: skip
_CHUNKS = tuple(float(4**power) for power in range(10))
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,127}\Z")
_UNKNOWN_LABELS = tuple(f"label_{number}" for number in range(1, 10))
_UNKNOWN_SECONDS_BOUNDS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
"""Bounds that vLLM exposes for a family without bounds: the defaults of prometheus_client."""
_UNKNOWN_SIZE_BOUNDS = tuple(float(10**power) for power in range(11))


_ROWS = SampledRows("vllm:")
_counter, _gauge, _histogram = _ROWS.counter, _ROWS.gauge, _ROWS.histogram


def _created_early(feature: str, *rows: Row) -> tuple[Row, ...]:
    """Return ``rows`` with ``feature``, since the engine creates their series at its start."""
    return tuple(dataclasses.replace(row, feature=feature) for row in rows)


def _since(version: str, *rows: Row) -> tuple[Row, ...]:
    return tuple(dataclasses.replace(row, since=version) for row in rows)


def _deprecated(row: Row, successor: str) -> Row:
    return dataclasses.replace(
        row, status="deprecated", successor=successor, closed=TRANSFER_TYPES, feature="kv_offload"
    )


def _of_front_end(row: Row, *labels: str) -> Row:
    """Return ``row`` with ``labels`` only, since the front end does not have the engine's labels."""
    return dataclasses.replace(row, labels=labels)


# The tables are laid out by hand: name above text, two lines a row.
# fmt: off
NIXL = _created_early(
    "nixl",
    _histogram("nixl_xfer_time_seconds",
               "Duration of one NIXL transfer.", _TRANSFER_SECONDS),
    _histogram("nixl_post_time_seconds",
               "Time to post one transfer to NIXL.", _POST_SECONDS),
    _histogram("nixl_bytes_transferred",
               "Bytes of one NIXL transfer.", _TRANSFER_BYTES),
    _histogram("nixl_num_descriptors",
               "Memory descriptors in one NIXL transfer.", _DESCRIPTORS),
    _counter("nixl_num_failed_transfers_total",
             "NIXL operations that failed: transfers, handshakes and notifications."),
    _counter("nixl_num_failed_notifications_total",
             "NIXL notifications that failed, which also count as failed transfers."),
    _counter("nixl_num_kv_expired_reqs_total",
             "Requests whose blocks expired on the prefill side before they were fetched."),
    _counter("nixl_num_notifications_after_expiry_total",
             "Notifications of a remote rank that arrived after the blocks expired."),
)
MOONCAKE = _since("0.33", *_created_early(
    "mooncake",
    _histogram("mooncake_xfer_time_seconds",
               "Duration of one Mooncake transfer, measured by the sender.", _TRANSFER_SECONDS),
    _histogram("mooncake_bytes_transferred",
               "Bytes of one Mooncake transfer.", _TRANSFER_BYTES),
    _histogram("mooncake_num_descriptors",
               "Memory descriptors in one Mooncake transfer.", _DESCRIPTORS),
    _counter("mooncake_num_failed_transfers_total",
             "Mooncake transfers that failed at the sender."),
    _counter("mooncake_num_failed_recvs_total",
             "Mooncake transfers that failed at the receiver."),
    _counter("mooncake_num_kv_expired_reqs_total",
             "Requests whose blocks expired on the prefill side before they were sent."),
))
_MOONCAKE_STORE = (
    _histogram("mooncake_store_operation_time_seconds",
               "Duration of one call to the Mooncake store.", _STORE_SECONDS,
               "operation", "status"),
    _counter("mooncake_store_operation_total",
             "Calls to the Mooncake store.", "operation", "status"),
    _counter("mooncake_store_operation_keys_total",
             "Keys in calls to the Mooncake store.", "operation", "status"),
    _counter("mooncake_store_operation_bytes_total",
             "Bytes transferred by calls to the Mooncake store.", "operation", "status"),
    _counter("mooncake_store_operation_failed_keys_total",
             "Keys for which a call to the Mooncake store failed.", "operation", "status"),
)
HISPARSE = (
    *_created_early(
        "hisparse",
        _counter("hisparse_cache_hits_total",
                 "Lookups found in the hot buffer of HiSparse on the device."),
        _counter("hisparse_cache_misses_total",
                 "Lookups not found in the hot buffer of HiSparse on the device."),
        _counter("hisparse_host_to_device_bytes_total",
                 "Bytes copied from host memory into hot buffers of HiSparse."),
    ),
    _gauge("hisparse_host_cache_usage_perc",
           "Share of HiSparse's host cache in use, from 0 to 1; evictable blocks count as free.",
           combine="max"),
    _gauge("hisparse_pending_page_transfers",
           "Pages that HiSparse is copying to or from the host."),
    _histogram("hisparse_host_block_lifetime_seconds",
               "Time from allocation to eviction of a sampled host block of HiSparse.",
               "kv_cache_residency"),
    _histogram("hisparse_host_block_idle_before_evict_seconds",
               "Time from last use to eviction of a sampled host block of HiSparse.",
               "kv_cache_residency"),
    _histogram("hisparse_host_block_reuse_gap_seconds",
               "Time between two uses of a sampled host block of HiSparse.", "kv_cache_residency"),
)
_UMBP = _since(
    "0.33",
    _counter("umbp_transfer_submitted_total", "Objects submitted to UMBP.", "operation"),
    _counter("umbp_transfer_completed_total", "Objects that UMBP transferred.", "operation"),
    _counter("umbp_transfer_failed_total", "Objects that UMBP failed to transfer.", "operation"),
    _counter("umbp_transfer_bytes_total", "Bytes of completed UMBP transfers.", "operation"),
)
_SIMPLE_OFFLOAD = (
    _counter("simple_kv_offload_save_outcomes_total",
             "Blocks that were candidates for the offload pool, by outcome.", "outcome"),
    _counter("simple_kv_offload_load_blocks_total",
             "Blocks loaded from the offload pool, each of which saves prefill work."),
    _gauge("simple_kv_offload_used_blocks",
           "Blocks of the offload pool in use by a transfer or a cache hit."),
    _gauge("simple_kv_offload_pending_store_blocks",
           "Blocks being stored in the offload pool; if this only grows, a store hangs."),
    _gauge("simple_kv_offload_info",
           "Configuration of the offload pool as labels; always 1.",
           "backend", "page_cache", "lazy_offload", "capacity_blocks", combine="max"),
)
HF3FS = _created_early(
    "hf3fs",
    _histogram("hf3fs_save_duration_seconds", "Duration of one save to 3FS.", _FILE_SECONDS),
    _histogram("hf3fs_load_duration_seconds", "Duration of one load from 3FS.", _FILE_SECONDS),
    _counter("hf3fs_num_failed_save_total", "Saves to 3FS that failed."),
    _counter("hf3fs_num_failed_load_total", "Loads from 3FS that failed."),
)
_OFFLOAD = (
    _deprecated(_counter("kv_offload_total_bytes_total",
                         "Bytes offloaded or loaded back.", "transfer_type"),
                "vllm:kv_offload_load_bytes_total and vllm:kv_offload_store_bytes_total"),
    _deprecated(_counter("kv_offload_total_time_total",
                         "Time spent offloading or loading back, in seconds.", "transfer_type"),
                "vllm:kv_offload_load_time_total and vllm:kv_offload_store_time_total"),
    _deprecated(_histogram("kv_offload_size",
                           "Bytes of one transfer to or from the host.", _OFFLOAD_BYTES,
                           "transfer_type"),
                "vllm:kv_offload_load_size and vllm:kv_offload_store_size"),
    _gauge("kv_offload_cpu_cache_usage_perc",
           "Share of the host cache in use by transfers, from 0 to 1.", combine="max"),
    _gauge("kv_offload_cpu_cache_write_usage_perc",
           "Share of the host cache in use by unfinished stores, from 0 to 1.", combine="max"),
    _gauge("kv_offload_cpu_cache_read_usage_perc",
           "Share of the host cache in use by unfinished loads, from 0 to 1.", combine="max"),
    _histogram("kv_offload_cpu_allocation_size",
               "Chunks of the host cache that one store requested.", _CHUNKS),
    _counter("kv_offload_stores_skipped_total",
             "Stores skipped because the blocks had not been reused often enough."),
    _counter("kv_offload_load_bytes_total", "Bytes loaded to the device."),
    _counter("kv_offload_load_time_total", "Time spent loading to the device, in seconds."),
    _histogram("kv_offload_load_size", "Bytes of one load to the device.", _OFFLOAD_BYTES),
    _counter("kv_offload_store_bytes_total", "Bytes offloaded from the device."),
    _counter("kv_offload_store_time_total", "Time spent offloading from the device, in seconds."),
    _histogram("kv_offload_store_size", "Bytes of one store from the device.", _OFFLOAD_BYTES),
    _histogram("kv_offload_lookup_sync_delay_seconds",
               "Duration of one lookup in the offload storage.", _SYNC_LOOKUP_SECONDS),
    _histogram("kv_offload_lookup_async_delay_seconds",
               "Time from a request's first deferred lookup to an answer or the request's end.",
               _ASYNC_LOOKUP_SECONDS),
    _counter("kv_offload_allocation_failure_total",
             "Stores that failed because the offload storage was full."),
    *_since("0.33", _gauge(
        "kv_offload_config_info",
        "Configuration of the engine's offload storage as labels; always 1.",
        "cpu_num_chunks", "cpu_blocks_per_chunk", "cpu_kv_cache_size_bytes",
        "cpu_kv_cache_size_tokens", "tier", combine="max")),
)
_TIERING = (
    _histogram("kv_offload_tiering_lookup_sync_delay_seconds",
               "Time that one lookup in a tier blocked.", _SYNC_LOOKUP_SECONDS, "tier"),
    _histogram("kv_offload_tiering_lookup_async_delay_seconds",
               "Time from a tier's first deferral of a lookup to its answer.", _ASYNC_LOOKUP_SECONDS,
               "tier"),
    _counter("kv_offload_tiering_read_bytes_total",
             "Bytes read from a tier into the primary tier.", "tier"),
    _counter("kv_offload_tiering_read_time_total",
             "Time spent reading from a tier into the primary tier, in seconds.", "tier"),
    _counter("kv_offload_tiering_write_bytes_total",
             "Bytes written from the primary tier to a tier.", "tier"),
    _counter("kv_offload_tiering_write_time_total",
             "Time spent writing from the primary tier to a tier, in seconds.", "tier"),
    _counter("kv_offload_tiering_promotion_job_failures_total",
             "Jobs that failed to promote chunks from a tier.", "tier"),
    _counter("kv_offload_tiering_cascade_job_failures_total",
             "Jobs that failed to cascade chunks to a tier.", "tier"),
    _counter("kv_offload_tiering_chunk_queries_total", "Chunks looked up in a tier.", "tier"),
    _counter("kv_offload_tiering_chunk_hits_total", "Chunks found in a tier.", "tier"),
    _counter("kv_offload_tiering_promotion_allocation_failures_total",
             "Promotions that failed because the primary tier was full."),
    _gauge("kv_offload_tiering_primary_write_usage_perc",
           "Share of the primary tier in use by reads from a tier, from 0 to 1.", "tier",
           combine="max"),
    _gauge("kv_offload_tiering_primary_read_usage_perc",
           "Share of the primary tier in use by writes to a tier, from 0 to 1.", "tier",
           combine="max"),
    _gauge("kv_offload_tiering_active_promotion_jobs",
           "Running jobs that promote chunks from a tier.", "tier"),
    _gauge("kv_offload_tiering_active_cascade_jobs",
           "Running jobs that cascade chunks to a tier.", "tier"),
    *_since("0.33", _histogram(
        "kv_offload_tiering_promotion_latency_seconds",
        "Time from the creation of a promotion job to its observed end, including queueing and"
        " failures.",
        _PROMOTION_SECONDS, "tier", "result")),
    _gauge("kv_offload_tiering_backpressure_store_latency_ema",
           "Moving average of the seconds that a tier takes to store one MiB.", "tier",
           combine="max"),
    _counter("kv_offload_tiering_backpressure_stores_dropped_total",
             "Stores dropped because a tier was too slow.", "tier"),
    _counter("kv_offload_tiering_backpressure_blocks_dropped_total",
             "Blocks dropped because a tier was too slow.", "tier"),
)
FRONT_END: tuple[Row, ...] = (
    _of_front_end(_histogram("sleep_mode_operation_duration_seconds",
                             "Duration of putting the engine to sleep or waking it.",
                             _OPERATION_SECONDS), "operation"),
    _of_front_end(_gauge("sleep_mode_operations_in_flight",
                         "Calls that wait for the engine to sleep or wake."), "operation"),
    _of_front_end(_histogram("rl_weight_update_operation_duration_seconds",
                             "Duration of one step of a weight update.",
                             _OPERATION_SECONDS), "operation"),
    _of_front_end(_gauge("rl_weight_update_operations_in_flight",
                         "Calls that wait for a step of a weight update."), "operation"),
    _of_front_end(_gauge("websocket_connections_active", "Realtime sessions that are open.")),
    _of_front_end(_counter("websocket_connections_total", "Realtime sessions that were accepted.")),
    _of_front_end(_histogram("websocket_connection_duration_seconds",
                             "Duration of a realtime session.", _SESSION_SECONDS)),
    _of_front_end(_counter("tool_call_parser_invocations_total",
                           "Calls of the tool parser: one per choice, or one per streamed delta."),
                  "mode", "model_name", "outcome", "request_type"),
)
# fmt: on

ROWS: tuple[Row, ...] = (
    *NIXL,
    *MOONCAKE,
    *_MOONCAKE_STORE,
    *HISPARSE,
    *_UMBP,
    *_SIMPLE_OFFLOAD,
    *HF3FS,
    *_OFFLOAD,
    *_TIERING,
    *FRONT_END,
)


def uncatalogued_row(name: str, kind: Kind, labels: int) -> Row | None:
    """Return a row for a family outside the catalogue, from a tier or a user's spec; None if it has none."""
    countable = (kind == "counter") == name.endswith("_total")
    if not countable or not _NAME.match(name) or labels > len(_UNKNOWN_LABELS):
        return None
    bounds = _UNKNOWN_SECONDS_BOUNDS if "seconds" in name else _UNKNOWN_SIZE_BOUNDS
    return Row(
        name=name,
        kind=kind,
        source=Sampled(),
        help="Reported by the KV connector of the engine.",
        labels=_UNKNOWN_LABELS[:labels],
        bounds=bounds if kind == "histogram" else (),
    )
