"""Rows of SGLang's cache families (0.5.23): the radix cache, the host's cache, and storage behind it.

Neither collector has a label for the model. Tokens moved between device and host are the same on
every tensor-parallel rank; bytes differ per rank.
"""

from __future__ import annotations

from sidestep.catalog.row import Row
from sidestep.engines.sglang.collectors import RADIX as _R
from sidestep.engines.sglang.collectors import STORAGE as _S

UNFULFILLED_REASONS = (
    "below_threshold",
    "host_capacity",
    "device_capacity",
    "device_covered",
    "storage_transfer",
    "deadline",
    "anchor_lost",
    "aux_window_trim",
    "device_overlap",
    "cache_admission_shortfall",
    "dropped",
)
DEFERRED_REASONS = ("host_capacity", "device_capacity")

_BACKUP_SECONDS = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_PAGES = (1.0, 5.0, 10.0, 50.0, 100.0)
_GIGABYTES_PER_SECOND = (0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0)

# The tables are laid out by hand: name above text, two lines a row.
# fmt: off
_STORAGE = (
    _S.counter("prefetched_tokens_total",
               "Tokens whose KV was read from storage into the host's memory, whether used or not."),
    _S.counter("backuped_tokens_total",
               "Tokens whose KV was written from the host's memory to storage."),
    _S.counter("storage_prefetch_hit_tokens_total",
               "Tokens whose KV was found in storage, whether read or not."),
    _S.counter("storage_prefetch_unfulfilled_tokens_total",
               "Tokens whose KV was found in storage, but not used by the attempt to read it.",
               "reason", closed=UNFULFILLED_REASONS),
    _S.counter("storage_prefetch_deferred_tokens_total",
               "Tokens whose KV was left in storage until there is enough memory.",
               "reason", closed=DEFERRED_REASONS),
    _S.counter("hicache_backup_dropped_tokens_total",
               "Tokens whose KV should have been written to storage, but was dropped."),
    _S.counter("hicache_prefetch_aux_alloc_failed_tokens_total",
               "Tokens whose KV was not read from storage because a secondary pool was full."),
    _S.histogram("prefetch_pgs", "Pages of one read from storage.", _PAGES),
    _S.histogram("backup_pgs", "Pages of one write to storage.", _PAGES),
    _S.histogram("prefetch_bandwidth",
                 "Speed of one read from storage, in gigabytes per second.",
                 _GIGABYTES_PER_SECOND),
    _S.histogram("backup_bandwidth",
                 "Speed of one write to storage, in gigabytes per second.",
                 _GIGABYTES_PER_SECOND),
)
_RADIX = (
    _R.histogram("eviction_duration_seconds",
                 "Duration of an eviction from the device, including a copy to the host if it makes"
                 " one.", "sglang_eviction_duration"),
    _R.counter("evicted_tokens_total",
               "Token slots of the device freed by eviction, whether copied to the host or not."),
    _R.histogram("load_back_duration_seconds",
                 "Duration of a copy of KV from the host to the device.",
                 "sglang_load_back_duration"),
    _R.counter("load_back_tokens_total",
               "Tokens whose KV was copied from the host to the device.", "pool"),
    _R.histogram("hicache_backup_duration_seconds",
                 "Duration of a copy of KV from the device to the host.", _BACKUP_SECONDS),
    _R.of_rank.counter("hicache_backup_bytes_total", "Bytes copied from the device to the host."),
    _R.of_rank.counter("load_back_bytes_total", "Bytes copied from the host to the device."),
    _R.counter("hicache_backup_tokens_total",
               "Tokens whose KV was copied from the device to the host.", "pool"),
    _R.counter("hicache_dropped_tokens_total",
               "Tokens whose KV left the device without a copy on the host.", "reason", "pool"),
)
# fmt: on

ROWS: tuple[Row, ...] = (*_STORAGE, *_RADIX)
