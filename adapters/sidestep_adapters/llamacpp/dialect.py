"""llama.cpp's dialect."""

from __future__ import annotations

from sidestep.catalog.dialect import KeySeries, LiveSeries, Series
from sidestep.engines.dialect import Dialect
from sidestep.engines.polled_page import PageHandlers, PolledPage
from sidestep.engines.shared_rows import MAX_RUNNING_REQUESTS
from sidestep_adapters.llamacpp.rows import (
    CACHED,
    COMMON_ROWS,
    COMPUTED,
    CONTEXT_USAGE,
    ROWS,
    RUNNING,
    STEPS,
    WAITING,
)

DIALECT: Dialect = Dialect(
    name="llamacpp",
    title="llama.cpp",
    rows=ROWS,
    common_rows=COMMON_ROWS,
    items=(PolledPage,),
    polled=PolledPage,
    handlers=PageHandlers,
    # The server counts no requests, so there is no series of those that begin, and no saturation.
    key_series=KeySeries(
        running=Series(RUNNING),
        waiting=Series(WAITING),
        prompt=Series(COMPUTED),
        generation=Series("llamacpp:tokens_predicted_total"),
        kv_cache_usage=Series(CONTEXT_USAGE),
        drafted=Series("llamacpp:spec_decode_num_draft_tokens_total"),
        accepted=Series("llamacpp:spec_decode_num_accepted_tokens_total"),
        slots=Series(MAX_RUNNING_REQUESTS),
        steps=Series(STEPS),
    ),
    live_series=LiveSeries(looked_up=(Series(COMPUTED), Series(CACHED)), found=(Series(CACHED),)),
)
