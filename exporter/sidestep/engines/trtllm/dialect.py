"""TensorRT-LLM's dialect."""

from __future__ import annotations

from sidestep.catalog.dialect import (
    ALL_VALUES,
    AvailabilityCounts,
    KeySeries,
    LiveSeries,
    Series,
)
from sidestep.engines.dialect import Dialect
from sidestep.engines.polled_page import PageHandlers, PolledPage
from sidestep.engines.trtllm import page_rows, rows
from sidestep.engines.trtllm.page_rows import (
    CACHED,
    E2E,
    ERRORS,
    GENERATED,
    MOST,
    PROMPT,
    QUEUE,
    RUNNING,
    SUCCESS,
    TPOT,
    TTFT,
    USAGE,
    WAITING,
)
from sidestep.metrics.engine import Engine
from sidestep.metrics.histogram import Histogram


def availability_counts(engine: Engine) -> AvailabilityCounts | None:
    """Return how many requests were served, and how many failed by the server's fault."""
    found = engine.open_families.get(SUCCESS)
    if found is None:
        return None
    served = [n for n in found.children.values() if not isinstance(n, Histogram)]
    errors = engine.open_families.get(ERRORS)
    children = {} if errors is None else errors.children
    failed = [
        n for (code,), n in children.items() if code[:1] == "5" and not isinstance(n, Histogram)
    ]
    return sum(served), sum(failed)


DIALECT: Dialect = Dialect(
    name="trtllm",
    title="TensorRT-LLM",
    rows=(*page_rows.ROWS, *rows.OWN_ROWS),
    common_rows=rows.COMMON_ROWS,
    items=(PolledPage,),
    polled=PolledPage,
    handlers=PageHandlers,
    key_series=KeySeries(
        running=Series(RUNNING),
        waiting=Series(WAITING),
        prompt=Series(PROMPT),
        generation=Series(GENERATED),
        kv_cache_usage=Series(USAGE),
        preemptions=Series(rows.PAUSES),
        drafted=Series("trtllm_spec_decode_num_draft_tokens_total"),
        accepted=Series("trtllm_spec_decode_num_accepted_tokens_total"),
        # Of requests that have ended: their rate is that of requests that begin.
        begun=Series(TTFT),
        slots=Series(MOST),
    ),
    live_series=LiveSeries(
        finished=(Series(SUCCESS, ALL_VALUES), Series(ERRORS, ALL_VALUES)),
        looked_up=(Series(PROMPT),),
        found=(Series(CACHED),),
    ),
    latencies={"ttft": TTFT, "time_per_output_token": TPOT, "e2e": E2E, "queue": QUEUE},
    availability_counts=availability_counts,
)
