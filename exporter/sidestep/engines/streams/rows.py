"""Rows fed by engines' native streams, with the prefix ``sidestep_``.

The streams are KV events, forward-pass metrics and load, each with the feature of that name. No
family has the name of another dialect's, so that an engine that also pushes is never counted twice.

SGLang proposes names for lifetimes in its cache (sgl-project/sglang#38559, open). None of them is
used here, since their meaning differs: ``kv_lifetime_seconds`` and ``kv_age_seconds`` observe nodes
of the radix tree, weighted by their tokens, and ``kv_reuses`` counts lookups that found a node;
events describe blocks, and no lookups.
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
"""Features: the streams that an engine has."""
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
        "Blocks stored in the engine's prefix cache, according to its KV events.",
    ),
    _by_medium(
        "cache_removed_blocks_total",
        "counter",
        Handler("removed_blocks"),
        "Blocks removed from the engine's prefix cache, according to its KV events, not including"
        " those removed by clearing the cache.",
    ),
    _kv(
        "cache_clears_total",
        "counter",
        Handler("cache_clears"),
        "Times the engine's prefix cache was cleared, according to its KV events.",
    ),
    _by_medium(
        "cache_resident_blocks",
        "gauge",
        Handler("resident_blocks"),
        "Blocks in the engine's prefix cache, according to its KV events; no sample while required"
        " events are missing.",
    ),
    _cached("lifetime", "Time from storing a sampled block's hash in a cache to its removal."),
    _cached("idle", "Time from the last store of a sampled block's hash to its removal."),
    _cached("reuse_gap", "Time between consecutive reuses of a sampled block's hash in a cache."),
    _kv(
        "cached_sample_ratio",
        "gauge",
        Computed("kv_cached_sample_ratio"),
        "Share of the block hashes in a prefix cache whose lifetime is tracked.",
        combine="mean",
    ),
    _kv(
        "cached_tracked_blocks",
        "gauge",
        Computed("kv_tracked_blocks"),
        "Block hashes in a prefix cache whose lifetime is tracked now, or is not yet observed.",
    ),
    _kv(
        "cached_sample_halvings_total",
        "counter",
        Handler("kv_sample_halvings"),
        "Times the share of tracked block hashes was halved because there were too many.",
    ),
    _kv(
        "cached_abandoned_blocks_total",
        "counter",
        Handler("kv_abandoned_blocks"),
        "Tracked block hashes whose removal was never reported because the engine restarted or"
        " events were lost; their lifetimes are in no histogram.",
    ),
    _kv(
        "cached_unknown_events_total",
        "counter",
        Handler("kv_unknown_events"),
        "Events of tracked block hashes with a time before that of the previous event.",
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
        "Requests of a forward pass in prefill.",
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
        "Prompt tokens whose KV existed before a forward pass, of its requests in prefill.",
    ),
    _scheduled(
        "decode_requests",
        "scheduled.num_decode_requests",
        "iteration_requests",
        "Requests of a forward pass in decode.",
    ),
    _scheduled(
        "decode_kv_tokens",
        "scheduled.sum_decode_kv_tokens",
        "held_tokens",
        "Tokens whose KV a forward pass reads for its requests in decode.",
    ),
    _row(
        FORWARD_PASS,
        "forward_pass_tokens_total",
        "counter",
        PHASES,
        "Tokens that forward passes compute: prompt tokens, and one for each request in decode.",
        labels=("phase",),
        closed=tuple(PHASES),
    ),
    _state(
        "scheduled_prefill_requests",
        "scheduled.num_prefill_requests",
        "Requests in prefill in the last forward pass; 0 while idle.",
    ),
    _state(
        "scheduled_decode_requests",
        "scheduled.num_decode_requests",
        "Requests in decode in the last forward pass; 0 while idle.",
    ),
    _state(
        "scheduled_decode_kv_tokens",
        "scheduled.sum_decode_kv_tokens",
        "Tokens whose KV the last forward pass read for requests in decode; 0 while idle.",
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
        "Variance of the KV tokens of requests in decode, in tokens squared, in the last forward"
        " pass.",
        "mean",
    ),
    _state(
        "queued_prefill_requests",
        "queued.num_prefill_requests",
        "Requests that had not started and waited during the last forward pass.",
    ),
    _state(
        "queued_prefill_tokens",
        "queued.sum_prefill_tokens",
        "Prompt tokens of waiting requests that had not started, including those in the prefix"
        " cache.",
    ),
    _state(
        "queued_prefill_length_variance",
        "queued.var_prefill_length",
        "Variance of the prompt lengths, in tokens squared, of waiting requests that had not"
        " started.",
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
        "Tokens of preempted requests that waited during the last forward pass.",
    ),
    _state(
        "queued_decode_kv_tokens_variance",
        "queued.var_decode_kv_tokens",
        "Variance of the tokens of waiting preempted requests, in tokens squared.",
        "mean",
    ),
    # Load.
    _load("running_requests", "gauge", "running", "Running requests, by the engine's load report."),
    _load("waiting_requests", "gauge", "waiting", "Waiting requests, by the engine's load report."),
    _load("kv_tokens", "gauge", "num_tokens", "KV tokens in use, by the engine's load report."),
    _load(
        "max_kv_tokens",
        "gauge",
        "max_tokens",
        "Capacity of the KV cache in tokens, by the engine's load report.",
    ),
    _load(
        "total_tokens",
        "gauge",
        "total_tokens",
        "Tokens of running and waiting requests, by the engine's load report.",
    ),
    _load(
        "waiting_uncached_tokens",
        "gauge",
        "waiting_uncached_tokens",
        "Tokens of waiting requests not in the prefix cache, by the engine's load report.",
    ),
    _load(
        "max_running_requests",
        "gauge",
        "max_running",
        "Most requests that run at once, by the engine's load report.",
    ),
    _load(
        "prefill_uncached_tokens_total",
        "counter",
        "prefill_uncached_tokens",
        "Prompt tokens computed, by the engine's load report.",
    ),
    _load(
        "prefill_busy_seconds_total",
        "counter",
        "prefill_busy_seconds",
        "Time in which prompts were computed, by the engine's load report.",
    ),
    # All of them.
    _row(
        "",
        "stream_refused_observations_total",
        "counter",
        Handler("refused_observations"),
        "Observations of an engine's native streams that were refused because they were negative"
        " or not a number.",
    ),
)
