"""Triton's dialect."""

from __future__ import annotations

from sidestep.catalog.dialect import LiveSeries, Quotient, Series
from sidestep.engines.dialect import Dialect
from sidestep_adapters.triton.handlers import TritonHandlers
from sidestep_adapters.triton.rows import CACHE, MODEL, RESPONSES, ROWS
from sidestep_adapters.triton.wire import ModelStats, TritonStats

SUCCEEDED = Series("nv_inference_request_success")
FAILED = Series("sidestep_triton_failed_requests_total")
MICROSECOND = 1e-6

DIALECT: Dialect = Dialect(
    name="triton",
    title="Triton",
    rows=ROWS,
    items=(TritonStats,),
    structs=(ModelStats,),
    polled=TritonStats,
    has_own_namespace=True,
    bare_counters="nv_",
    # An engine is a version of a model; the server is an engine of its own.
    part_labels=frozenset(MODEL),
    handlers=TritonHandlers,
    feature_options={
        CACHE: "a model with a response cache (--cache-config of Triton)",
        RESPONSES: "a decoupled model",
    },
    live_series=LiveSeries(
        finished=(SUCCEEDED, FAILED),
        own={
            "requests_per_second": Quotient(SUCCEEDED),
            "failures_per_second": Quotient(FAILED),
            "mean_queue_seconds": Quotient(
                Series("nv_inference_queue_duration_us"), SUCCEEDED, MICROSECOND
            ),
            "mean_latency_seconds": Quotient(
                Series("nv_inference_request_duration_us"), SUCCEEDED, MICROSECOND
            ),
        },
    ),
)
