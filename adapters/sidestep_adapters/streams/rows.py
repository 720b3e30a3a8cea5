"""Rows fed by engines' native streams, with the prefix ``sidestep_``.

The streams are KV events, forward-pass metrics and load, each with the feature of that name. No
family has the name of another dialect's, so that an engine that also pushes is never counted twice.

SGLang proposes names for lifetimes in its cache (sgl-project/sglang#38559, open). None of them is
used here, since their meaning differs: ``kv_lifetime_seconds`` and ``kv_age_seconds`` observe nodes
of the radix tree, weighted by their tokens, and ``kv_reuses`` counts lookups that found a node;
events describe blocks, and no lookups.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from sidestep.catalog.row import Computed, Handler, Row, Sampled
from sidestep.engines.row_builders import counter, gauge, histogram

KV_EVENTS, FORWARD_PASS, LOAD = "kv_events", "forward_pass", "load"
"""Features: the streams that an engine has."""
PHASES: Mapping[str, str] = {
    "prefill": "ran.scheduled.sum_prefill_tokens",
    "decode": "ran.scheduled.num_decode_requests",
}


_kv_counter, _kv_gauge, _kv_histogram = (
    functools.partial(kind, feature=KV_EVENTS) for kind in (counter, gauge, histogram)
)
_pass_counter, _pass_gauge, _pass_histogram = (
    functools.partial(kind, feature=FORWARD_PASS) for kind in (counter, gauge, histogram)
)
_load_counter, _load_gauge = (functools.partial(kind, feature=LOAD) for kind in (counter, gauge))


def _cached(name: str, text: str) -> Row:
    return _kv_histogram(
        f"sidestep_kv_cached_block_{name}_seconds",
        Sampled(),
        text,
        own=("medium",),
        buckets="kv_cache_residency",
    )


# The table is laid out by hand: name above text, two lines a row.
# fmt: off
ROWS: tuple[Row, ...] = (
    # KV events.
    _kv_counter("sidestep_kv_cache_stored_blocks_total", Handler("stored_blocks"),
                "Blocks stored in the engine's prefix cache, according to its KV events.",
                own=("medium",)),
    _kv_counter("sidestep_kv_cache_removed_blocks_total", Handler("removed_blocks"),
                "Blocks removed from the engine's prefix cache, according to its KV events, not"
                " including those removed by clearing the cache.", own=("medium",)),
    _kv_counter("sidestep_kv_cache_clears_total", Handler("cache_clears"),
                "Times the engine's prefix cache was cleared, according to its KV events."),
    _kv_gauge("sidestep_kv_cache_resident_blocks", Handler("resident_blocks"),
              "Blocks with different hashes in the engine's prefix cache, according to its KV"
              " events; no sample after a loss. What was stored or removed twice is corrected by"
              " the sampled hashes.", own=("medium",)),
    _cached("lifetime", "Time from storing a sampled block's hash in a cache to its removal."),
    _cached("idle", "Time from the last store of a sampled block's hash to its removal."),
    _cached("reuse_gap", "Time between consecutive reuses of a sampled block's hash in a cache."),
    _kv_counter("sidestep_kv_cached_stores_total", Handler("cached_stores"),
                "Stores of sampled hashes in the GPU's prefix cache, which did not have them."),
    _kv_histogram("sidestep_kv_cached_shortage_blocks", Handler("cached_shortage"),
                  "Blocks by which the GPU's prefix cache was too small to still have a sampled"
                  " hash that is stored again: a cache larger by as many would have saved the"
                  " store.", buckets="cache_blocks"),
    _kv_histogram("sidestep_kv_cached_absence_seconds", Handler("cached_absence"),
                  "Time from the removal of a sampled hash from the GPU's prefix cache until it is"
                  " stored again.", buckets="kv_cache_residency"),
    _kv_gauge("sidestep_kv_cached_sample_ratio", Computed("kv_cached_sample_ratio"),
              "Share of the hashes in a prefix cache that is sampled.", combine="mean"),
    _kv_gauge("sidestep_kv_cached_tracked_blocks", Computed("kv_tracked_blocks"),
              "Sampled hashes in a prefix cache that are tracked now."),
    _kv_counter("sidestep_kv_cached_refused_blocks_total", Handler("kv_refused_blocks"),
                "Times a sampled hash was not tracked because --kv.max-tracked was reached:"
                " histograms of cached blocks are biased while this grows; lower"
                " --kv.sample-rate."),
    _kv_counter("sidestep_kv_cached_abandoned_blocks_total", Handler("kv_abandoned_blocks"),
                "Tracked block hashes whose removal was never reported because the engine"
                " restarted or events were lost; their lifetimes are in no histogram."),
    _kv_counter("sidestep_kv_cached_unknown_events_total", Handler("kv_unknown_events"),
                "Events of tracked block hashes with a time before that of the previous event."),
    # Forward passes.
    _pass_histogram("sidestep_forward_pass_duration_seconds", "ran.wall_times[]",
                    "Duration of a forward pass, as the engine measures it.",
                    buckets="iteration_duration"),
    _pass_histogram("sidestep_forward_pass_prefill_requests", "ran.scheduled.num_prefill_requests",
                    "Requests of a forward pass in prefill.", buckets="iteration_requests"),
    _pass_histogram("sidestep_forward_pass_prefill_tokens", "ran.scheduled.sum_prefill_tokens",
                    "Prompt tokens that a forward pass computes.", buckets="iteration_tokens"),
    _pass_histogram("sidestep_forward_pass_prefill_kv_tokens",
                    "ran.scheduled.sum_prefill_kv_tokens",
                    "Prompt tokens whose KV existed before a forward pass, of its requests in"
                    " prefill.", buckets="held_tokens"),
    _pass_histogram("sidestep_forward_pass_decode_requests", "ran.scheduled.num_decode_requests",
                    "Requests of a forward pass in decode.", buckets="iteration_requests"),
    _pass_histogram("sidestep_forward_pass_decode_kv_tokens", "ran.scheduled.sum_decode_kv_tokens",
                    "Tokens whose KV a forward pass reads for its requests in decode.",
                    buckets="held_tokens"),
    _pass_counter("sidestep_forward_pass_tokens_total", PHASES,
                  "Tokens that forward passes compute: prompt tokens, and one for each request in"
                  " decode.", own=("phase",), closed=tuple(PHASES)),
    _pass_gauge("sidestep_forward_pass_scheduled_prefill_requests",
                "scheduled.num_prefill_requests",
                "Requests in prefill in the last forward pass; 0 while idle."),
    _pass_gauge("sidestep_forward_pass_scheduled_decode_requests", "scheduled.num_decode_requests",
                "Requests in decode in the last forward pass; 0 while idle."),
    _pass_gauge("sidestep_forward_pass_scheduled_decode_kv_tokens",
                "scheduled.sum_decode_kv_tokens",
                "Tokens whose KV the last forward pass read for requests in decode; 0 while idle."),
    _pass_gauge("sidestep_forward_pass_prefill_length_variance", "scheduled.var_prefill_length",
                "Variance of the prompt lengths, in tokens squared, in the last forward pass.",
                combine="mean"),
    _pass_gauge("sidestep_forward_pass_decode_kv_tokens_variance", "scheduled.var_decode_kv_tokens",
                "Variance of the KV tokens of requests in decode, in tokens squared, in the last"
                " forward pass.", combine="mean"),
    _pass_gauge("sidestep_forward_pass_queued_prefill_requests", "queued.num_prefill_requests",
                "Requests that had not started and waited during the last forward pass."),
    _pass_gauge("sidestep_forward_pass_queued_prefill_tokens", "queued.sum_prefill_tokens",
                "Prompt tokens of waiting requests that had not started, including those in the"
                " prefix cache."),
    _pass_gauge("sidestep_forward_pass_queued_prefill_length_variance", "queued.var_prefill_length",
                "Variance of the prompt lengths, in tokens squared, of waiting requests that had"
                " not started.", combine="mean"),
    _pass_gauge("sidestep_forward_pass_queued_decode_requests", "queued.num_decode_requests",
                "Preempted requests that waited during the last forward pass."),
    _pass_gauge("sidestep_forward_pass_queued_decode_kv_tokens", "queued.sum_decode_kv_tokens",
                "Tokens of preempted requests that waited during the last forward pass."),
    _pass_gauge("sidestep_forward_pass_queued_decode_kv_tokens_variance",
                "queued.var_decode_kv_tokens",
                "Variance of the tokens of waiting preempted requests, in tokens squared.",
                combine="mean"),
    # Load.
    _load_gauge("sidestep_load_running_requests", "running",
                "Running requests, by the engine's load report."),
    _load_gauge("sidestep_load_waiting_requests", "waiting",
                "Waiting requests, by the engine's load report."),
    _load_gauge("sidestep_load_kv_tokens", "num_tokens",
                "KV tokens in use, by the engine's load report."),
    _load_gauge("sidestep_load_max_kv_tokens", "max_tokens",
                "Capacity of the KV cache in tokens, by the engine's load report."),
    _load_gauge("sidestep_load_total_tokens", "total_tokens",
                "Tokens of running and waiting requests, by the engine's load report."),
    _load_gauge("sidestep_load_waiting_uncached_tokens", "waiting_uncached_tokens",
                "Tokens of waiting requests not in the prefix cache, by the engine's load report."),
    _load_gauge("sidestep_load_max_running_requests", "max_running",
                "Most requests that run at once, by the engine's load report."),
    _load_counter("sidestep_load_prefill_uncached_tokens_total", "prefill_uncached_tokens",
                  "Prompt tokens computed since the first load report that the exporter received."),
    _load_counter("sidestep_load_prefill_busy_seconds_total", "prefill_busy_seconds",
                  "Time in which prompts were computed since the first load report that the"
                  " exporter received."),
    # All of them.
    counter("sidestep_stream_refused_observations_total", Handler("refused_observations"),
            "Observations of an engine's native streams that were refused because they were"
            " negative or not a number."),
)
# fmt: on
