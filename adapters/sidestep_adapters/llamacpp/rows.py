"""Rows of llama.cpp: the families of llama-server's page, and values from its other paths."""

from __future__ import annotations

from sidestep.catalog.row import ENGINE_LABELS, Alias, Computed, FeedsFrom, Row
from sidestep.engines.common_names import common_row
from sidestep.engines.polled_page import resets_row
from sidestep.engines.row_builders import SampledRows, gauge
from sidestep.engines.shared_rows import MAX_RUNNING_REQUESTS, REFUSED_OBSERVATIONS

_PAGE, _OWN = SampledRows("llamacpp:"), SampledRows("sidestep_llamacpp_")

RUNNING, WAITING = "llamacpp:requests_processing", "llamacpp:requests_deferred"
COMPUTED, CACHED = "llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"
STEPS = "llamacpp:n_decode_total"
CONTEXT_TOKENS = "sidestep_llamacpp_context_tokens"
CONTEXT_SIZE = "sidestep_llamacpp_context_size_tokens"
CONTEXT_USAGE = "sidestep_llamacpp_context_usage_ratio"

# The table is laid out by hand: name above text, two lines a row.
# fmt: off
ROWS: tuple[Row, ...] = (
    _PAGE.counter("prompt_tokens_total",
                  "Prompt tokens that were computed, without those found in the cache."),
    _PAGE.counter("prompt_tokens_cached_total",
                  "Prompt tokens found in a slot's cache instead of being computed."),
    _PAGE.counter("prompt_seconds_total",
                  "Time in which batches computed prompts; a batch of several requests counts"
                  " once."),
    _PAGE.counter("tokens_predicted_total", "Generated tokens, counted when their request ends."),
    _PAGE.counter("tokens_predicted_seconds_total",
                  "Time that requests spent generating, counted when they end; requests at the"
                  " same time add up."),
    _PAGE.counter("n_decode_total", "Calls of the model, each with a batch."),
    _PAGE.gauge("n_tokens_max",
                "Tokens of the longest sequence since the server started; llama-server calls this"
                " a counter.", combine="max"),
    _PAGE.counter("spec_decode_num_draft_tokens_total",
                  "Draft tokens, counted when their request ends."),
    _PAGE.counter("spec_decode_num_accepted_tokens_total",
                  "Accepted draft tokens, counted when their request ends."),
    _PAGE.counter("spec_decode_num_drafts_total",
                  "Verified drafts, counted when their request ends."),
    _PAGE.counter("spec_decode_num_accepted_tokens_per_pos_total",
                  "Accepted draft tokens by their position in the draft, from 0.", "position"),
    _PAGE.gauge("requests_processing", "Requests in a slot."),
    _PAGE.gauge("requests_deferred", "Requests that wait for a slot."),
    _PAGE.gauge("n_busy_slots_per_decode",
                "Mean number of slots in a batch, over all batches since the server started.",
                combine="mean"),
    # From the other paths.
    _OWN.gauge("context_tokens",
               "Tokens, prompts and generated ones, of the requests in slots; only if the server"
               " has /slots."),
    _OWN.gauge("context_size_tokens", "Tokens that fit into all slots."),
    _OWN.gauge("context_usage_ratio",
               "Tokens of the requests in slots as a share of those that fit, from 0 to 1.",
               combine="max"),
    gauge(MAX_RUNNING_REQUESTS, Computed("max_running_requests"),
          "Most requests in the batch: the server's slots (--parallel)."),
    resets_row("sidestep_llamacpp_", ENGINE_LABELS),
    REFUSED_OBSERVATIONS,
)
# fmt: on

COMMON_ROWS: tuple[Row, ...] = (
    common_row("sidestep_requests_running", Alias(RUNNING)),
    common_row("sidestep_requests_waiting", Alias(WAITING)),
    common_row("sidestep_kv_cache_usage_ratio", Alias(CONTEXT_USAGE)),
    common_row(
        "sidestep_prefix_cache_looked_up_tokens_total", (FeedsFrom(COMPUTED), FeedsFrom(CACHED))
    ),
    common_row("sidestep_prefix_cache_found_tokens_total", FeedsFrom(CACHED)),
)
