"""Rows of SGLang's families outside its ranks (0.5.23): processes, the HTTP server, encoders.

Most have no label that identifies their process: each process is an engine here, and the exporter
adds labels that distinguish them.
"""

from __future__ import annotations

from sidestep.catalog.row import Row
from sidestep.engines.sglang.collectors import ENCODER as _E
from sidestep.engines.sglang.collectors import PROCESS as _P

_FUNCTION_SECONDS = tuple(0.05 * 1.5**power for power in range(18))
_BATCH_ITEMS = (*map(float, range(1, 17)), 32.0, 64.0, 128.0)
_REQUEST_ITEMS = (*map(float, range(1, 9)), 10.0, 12.0, 16.0, 24.0, 32.0, 64.0)
_ENCODER_SECONDS = (
    0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0,
)  # fmt: skip
_FORWARD_SECONDS = _ENCODER_SECONDS[:9]
_WAIT_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
_PREPARE_SECONDS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_SEND_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

# The tables are laid out by hand: name above text, two lines a row.
# fmt: off
PROCESS = (
    _P.counter("failed_session_recoveries_total",
               "Mooncake sessions that failed and recovered."),
    _P.counter("http_requests_total", "HTTP requests received.", "endpoint", "method"),
    _P.counter("http_responses_total", "HTTP responses sent.",
               "endpoint", "method", "status_code"),
    _P.gauge("http_requests_active", "HTTP requests in progress.",
             "endpoint", "method"),
    _P.gauge("routing_keys_active", "Distinct routing keys of the requests in flight."),
    _P.counter("process_cpu_seconds_total", "CPU time of a process of the engine.", "component"),
    _P.histogram("eplb_gpu_physical_count",
                 "Ranks that have the experts which a layer's tokens chose.",
                 "sglang_eplb_physical_count", "layer"),
    _P.histogram("func_latency_seconds", "Duration of a call of a timed function.",
                 _FUNCTION_SECONDS, "name"),
    _P.gauge("startup_latency_breakdown_seconds_max",
             "Longest duration of a part of the startup.", "context", combine="max"),
)
# The dispatcher reports each rank; the series belong to the rank's engine.
PENDING = _E.gauge("encoder_dp_pending_requests",
                   "Requests sent to an encoder that are not answered yet.")
_ENCODER = (
    _E.counter("encoder_cache_evictions_total", "Entries evicted from an encoder's cache.",
               "modality"),
    _E.gauge("encoder_cache_size_mb", "Size of an encoder's cache, in MiB."),
    _E.gauge("encoder_cache_entries", "Entries of an encoder's cache."),
    _E.counter("encoder_cache_hit_tokens_total", "Tokens found in an encoder's cache.",
               "modality"),
    _E.counter("encoder_cache_total_tokens_total", "Tokens looked up in an encoder's cache.",
               "modality"),
    _E.counter("encoder_cache_hit_files_total", "Files found in an encoder's cache.",
               "modality"),
    _E.counter("encoder_cache_total_files_total", "Files looked up in an encoder's cache.",
               "modality"),
    _E.counter("encoder_requests_total", "Requests that an encoder finished.",
               "modality", "status"),
    _E.counter("encoder_requests_received_total", "Requests that an encoder received.", "modality"),
    _E.histogram("encoder_mm_items_per_batch", "Multimodal items of an encoder's batch.",
                 _BATCH_ITEMS, "modality"),
    _E.histogram("encoder_mm_items_per_request", "Multimodal items of a request to an encoder.",
                 _REQUEST_ITEMS, "modality"),
    _E.histogram("encoder_request_e2e_latency_seconds",
                 "Time from a request's arrival at an encoder to its end.", _ENCODER_SECONDS,
                 "modality"),
    _E.histogram("encoder_queue_wait_seconds", "Time that a request waited in an encoder's queue.",
                 _WAIT_SECONDS, "modality"),
    _E.histogram("encoder_preprocess_seconds",
                 "Time to load and prepare a request's items.", _PREPARE_SECONDS,
                 "modality"),
    _E.histogram("encoder_model_forward_seconds", "Duration of an encoder's forward pass.",
                 _FORWARD_SECONDS, "modality"),
    _E.histogram("encoder_transfer_seconds", "Time to transfer an encoder's output.",
                 _SEND_SECONDS, "backend"),
)
# fmt: on

ROWS: tuple[Row, ...] = (*PROCESS, PENDING, *_ENCODER)
