"""What the streams tell that engines publish by themselves, under our own prefix.

KV events, forward-pass metrics and load, each the feature of that name. No family here has the
name of another dialect's: an engine that also pushes is counted twice nowhere.

SGLang proposes names for lives of its cache (sgl-project/sglang#38559, open): none of them is
shown, since none means the same. Its ``kv_lifetime_seconds`` and ``kv_age_seconds`` observe
nodes of the radix tree, each weighted by its tokens, and ``kv_reuses`` counts lookups that
found a node; events tell of blocks, and of no lookup.
"""

from __future__ import annotations

from collections.abc import Mapping

from sidestep.catalog.model import (
    ENGINE_LABELS,
    Combine,
    Computed,
    Handler,
    Kind,
    Row,
    Sampled,
    Source,
)

KV_EVENTS, FORWARD_PASS, LOAD = "kv_events", "forward_pass", "load"
"""Features: which streams an engine has."""
PHASES: Mapping[str, str] = {
    "prefill": "ran.scheduled.sum_prefill_tokens",
    "decode": "ran.scheduled.num_decode_requests",
}


def _row(
    feature: str,
    name: str,
    kind: Kind,
    source: Source,
    text: str,
    *,
    labels: tuple[str, ...] = (),
    closed: tuple[str, ...] = (),
    buckets: str = "",
    combine: Combine = "sum",
) -> Row:
    return Row(
        name=f"sidestep_{name}",
        kind=kind,
        source=source,
        help=text,
        labels=tuple(sorted((*ENGINE_LABELS, *labels))),
        closed=closed,
        buckets=buckets,
        combine=combine,
        feature=feature,
    )


def _kv(name: str, kind: Kind, source: Source, text: str, *, combine: Combine = "sum") -> Row:
    return _row(KV_EVENTS, f"kv_{name}", kind, source, text, combine=combine)


def _by_medium(name: str, kind: Kind, source: Source, text: str, buckets: str = "") -> Row:
    return _row(KV_EVENTS, f"kv_{name}", kind, source, text, labels=("medium",), buckets=buckets)


def _cached(name: str, text: str) -> Row:
    return _by_medium(
        f"cached_block_{name}_seconds", "histogram", Sampled(), text, "kv_cache_residency"
    )


def _scheduled(name: str, path: str, buckets: str, text: str) -> Row:
    return _row(
        FORWARD_PASS,
        f"forward_pass_{name}",
        "histogram",
        f"ran.{path}",
        text,
        buckets=buckets,
    )


def _state(name: str, path: str, text: str, combine: Combine = "sum") -> Row:
    return _row(FORWARD_PASS, f"forward_pass_{name}", "gauge", path, text, combine=combine)


def _load(name: str, kind: Kind, path: str, text: str) -> Row:
    return _row(LOAD, f"load_{name}", kind, path, text)


ROWS: tuple[Row, ...] = (
    # KV events.
    _by_medium(
        "cache_stored_blocks_total",
        "counter",
        Handler("stored_blocks"),
        "Blocks that the engine's prefix cache stored, by its KV events.",
    ),
    _by_medium(
        "cache_removed_blocks_total",
        "counter",
        Handler("removed_blocks"),
        "Blocks that the engine's prefix cache removed, by its KV events; those that clearing it"
        " took are not among them.",
    ),
    _kv(
        "cache_clears_total",
        "counter",
        Handler("cache_clears"),
        "Times the engine's prefix cache was cleared, by its KV events.",
    ),
    _by_medium(
        "cache_resident_blocks",
        "gauge",
        Handler("resident_blocks"),
        "Blocks in the engine's prefix cache, by its KV events; no sample while events are"
        " missing that would tell.",
    ),
    _cached(
        "lifetime", "From when a sampled block's hash was stored in a cache until it was removed."
    ),
    _cached("idle", "From when a sampled block's hash was last stored until it was removed."),
    _cached("reuse_gap", "Between consecutive reuses of a sampled block's hash in a cache."),
    _kv(
        "cached_sample_ratio",
        "gauge",
        Computed("kv_cached_sample_ratio"),
        "Share of the hashes in a prefix cache whose life is followed.",
        combine="mean",
    ),
    _kv(
        "cached_tracked_blocks",
        "gauge",
        Computed("kv_tracked_blocks"),
        "Hashes in a prefix cache whose life is being followed, or waits to be told of.",
    ),
    _kv(
        "cached_sample_halvings_total",
        "counter",
        Handler("kv_sample_halvings"),
        "Times the share of followed hashes halved because there were too many.",
    ),
    _kv(
        "cached_abandoned_blocks_total",
        "counter",
        Handler("kv_abandoned_blocks"),
        "Followed hashes whose life's end was not heard: the engine restarted, or events were"
        " lost; their lifetimes are in no histogram.",
    ),
    _kv(
        "cached_unknown_events_total",
        "counter",
        Handler("kv_unknown_events"),
        "Events of followed hashes with a time before that of the last one.",
    ),
    # Forward passes.
    _scheduled(
        "duration_seconds",
        "wall_times[]",
        "iteration_duration",
        "Duration of a forward pass, as the engine measures it.",
    ),
    _scheduled(
        "prefill_requests",
        "scheduled.num_prefill_requests",
        "iteration_requests",
        "Requests of a forward pass whose prompt is computed.",
    ),
    _scheduled(
        "prefill_tokens",
        "scheduled.sum_prefill_tokens",
        "iteration_tokens",
        "Prompt tokens that a forward pass computes.",
    ),
    _scheduled(
        "prefill_kv_tokens",
        "scheduled.sum_prefill_kv_tokens",
        "held_tokens",
        "Prompt tokens whose KV was there before a forward pass, of those requests whose prompt"
        " it computes.",
    ),
    _scheduled(
        "decode_requests",
        "scheduled.num_decode_requests",
        "iteration_requests",
        "Requests of a forward pass that generate.",
    ),
    _scheduled(
        "decode_kv_tokens",
        "scheduled.sum_decode_kv_tokens",
        "held_tokens",
        "Tokens whose KV a forward pass reads for requests that generate.",
    ),
    _row(
        FORWARD_PASS,
        "forward_pass_tokens_total",
        "counter",
        PHASES,
        "Tokens that forward passes compute: of prompts, and one for each request that generates.",
        labels=("phase",),
        closed=tuple(PHASES),
    ),
    _state(
        "scheduled_prefill_requests",
        "scheduled.num_prefill_requests",
        "Requests whose prompt the last forward pass computed; 0 while idle.",
    ),
    _state(
        "scheduled_decode_requests",
        "scheduled.num_decode_requests",
        "Requests that generated in the last forward pass; 0 while idle.",
    ),
    _state(
        "scheduled_decode_kv_tokens",
        "scheduled.sum_decode_kv_tokens",
        "Tokens whose KV the last forward pass read for requests that generate; 0 while idle.",
    ),
    _state(
        "prefill_length_variance",
        "scheduled.var_prefill_length",
        "Variance of the prompt lengths, in tokens squared, in the last forward pass.",
        "mean",
    ),
    _state(
        "decode_kv_tokens_variance",
        "scheduled.var_decode_kv_tokens",
        "Variance of the KV tokens of requests that generate, in tokens squared, in the last"
        " forward pass.",
        "mean",
    ),
    _state(
        "queued_prefill_requests",
        "queued.num_prefill_requests",
        "Requests that had not begun and waited during the last forward pass.",
    ),
    _state(
        "queued_prefill_tokens",
        "queued.sum_prefill_tokens",
        "Prompt tokens of the requests that had not begun; what the prefix cache has is not"
        " taken off.",
    ),
    _state(
        "queued_prefill_length_variance",
        "queued.var_prefill_length",
        "Variance of the prompt lengths, in tokens squared, of the requests that had not begun.",
        "mean",
    ),
    _state(
        "queued_decode_requests",
        "queued.num_decode_requests",
        "Preempted requests that waited during the last forward pass.",
    ),
    _state(
        "queued_decode_kv_tokens",
        "queued.sum_decode_kv_tokens",
        "Tokens of the preempted requests that waited.",
    ),
    _state(
        "queued_decode_kv_tokens_variance",
        "queued.var_decode_kv_tokens",
        "Variance of the tokens of preempted requests, in tokens squared.",
        "mean",
    ),
    # Load.
    _load("running_requests", "gauge", "running", "Running requests, by the engine's load."),
    _load("waiting_requests", "gauge", "waiting", "Waiting requests, by the engine's load."),
    _load("kv_tokens", "gauge", "num_tokens", "Tokens in use, by the engine's load."),
    _load("max_kv_tokens", "gauge", "max_tokens", "Tokens that fit, by the engine's load."),
    _load(
        "total_tokens",
        "gauge",
        "total_tokens",
        "Tokens of running and waiting requests, by the engine's load.",
    ),
    _load(
        "waiting_uncached_tokens",
        "gauge",
        "waiting_uncached_tokens",
        "Tokens of waiting requests that the prefix cache has not, by the engine's load.",
    ),
    _load(
        "max_running_requests",
        "gauge",
        "max_running",
        "Requests that may run at once, by the engine's load.",
    ),
    _load(
        "prefill_uncached_tokens_total",
        "counter",
        "prefill_uncached_tokens",
        "Prompt tokens computed, by the engine's load.",
    ),
    _load(
        "prefill_busy_seconds_total",
        "counter",
        "prefill_busy_seconds",
        "Time in which prompts were computed, by the engine's load.",
    ),
    # All of them.
    _row(
        "",
        "stream_refused_observations_total",
        "counter",
        Handler("refused_observations"),
        "Observations of an engine's native streams left out: not a number, or negative.",
    ),
)
