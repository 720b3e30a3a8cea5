"""Triton's dialect."""

from __future__ import annotations

from sidestep.catalog.dialect import LiveSeries, Series
from sidestep.engines.dialect import Dialect
from sidestep.engines.triton.handlers import TritonHandlers
from sidestep.engines.triton.rows import MODEL, ROWS
from sidestep.engines.triton.wire import ModelStats, TritonStats

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
    live_series=LiveSeries(
        finished=(
            Series("nv_inference_request_success"),
            Series("sidestep_triton_failed_requests_total"),
        ),
    ),
)
