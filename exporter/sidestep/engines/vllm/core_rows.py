"""Rows fed by raw events of vLLM's core, which the engine itself does not expose.

Steps and requests come from request events, block lifetimes from block events. A tap in the engine
sends both: feature ``engine_core``.
"""

from __future__ import annotations

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
from sidestep.engines.vllm.rows import ADMISSION_REASONS
from sidestep.protocol.messages import ENGINE_CORE
from sidestep.tracking.requests.rules import UNTRACKED

STATES = ("waiting", "deferred", "preempted", "running", "swapped")
REFUSALS = ("prompt_too_long", *ADMISSION_REASONS)


def _row(
    name: str,
    kind: Kind,
    source: Source,
    text: str,
    *,
    label: str = "",
    closed: tuple[str, ...] = (),
    buckets: str = "",
    feature: str = ENGINE_CORE,
    combine: Combine = "sum",
) -> Row:
    labels = (*ENGINE_LABELS, label) if label else ENGINE_LABELS
    return Row(
        name=f"sidestep_{name}",
        kind=kind,
        source=source,
        help=text,
        labels=tuple(sorted(labels)),
        closed=closed,
        buckets=buckets,
        feature=feature,
        combine=combine,
    )


def _histogram(name: str, source: Source, buckets: str, text: str, *, label: str = "") -> Row:
    return _row(name, "histogram", source, text, buckets=buckets, label=label)


def _process(name: str, kind: Kind, text: str, *labels: str, combine: Combine = "sum") -> Row:
    return Row(
        name=f"sidestep_engine_process_{name}",
        kind=kind,
        source=Sampled(),
        help=text,
        labels=tuple(sorted((*ENGINE_LABELS, "process", *labels))),
        combine=combine,
    )


ROWS: tuple[Row, ...] = (
    # The scheduler's state.
    _row(
        "requests",
        "gauge",
        Handler("requests_by_state"),
        "Requests in the scheduler by state; preempted requests do not count as waiting."
        " vLLM V1 never swaps.",
        label="state",
        closed=STATES,
    ),
    _row(
        "refused_requests_total",
        "counter",
        Handler("refused_requests"),
        "Requests rejected before any work: by the front end because its queue was full, or by"
        " the engine's core because the prompt was too long. Up to 0.33, the front end answers"
        " prompts that are too long with 400, uncounted.",
        label="reason",
        closed=REFUSALS,
        feature="",
    ),
    _row(
        "untracked_requests_total",
        "counter",
        Handler("untracked_requests"),
        "Requests some of whose intervals are in no histogram: over the limit of requests in"
        " flight, unfinished for too long, interrupted by a restart of the engine or by dropped"
        " events, started before this exporter, or in flight while events were folded because"
        " no exporter was connected.",
        label="reason",
        closed=UNTRACKED,
    ),
    _histogram(
        "request_preempted_seconds",
        "preempted_seconds[]",
        "request_latency",
        "Time from a request's preemption until it was scheduled again or aborted.",
    ),
    _row(
        "longest_preemption_seconds",
        "gauge",
        Handler("longest_preemption"),
        "Longest time that a preempted request had waited at the engine's last step; 0 if none"
        " waits.",
        combine="max",
    ),
    # Aborted requests, which are in no request histogram of the engine's.
    _histogram(
        "aborted_request_prompt_tokens",
        "aborted[].prompt_tokens",
        "request_tokens",
        "Prompt tokens of an aborted request.",
    ),
    _histogram(
        "aborted_request_generation_tokens",
        "aborted[].generation_tokens",
        "request_tokens",
        "Tokens generated for a request before it was aborted.",
    ),
    _histogram(
        "aborted_request_duration_seconds",
        "aborted[].seconds",
        "request_latency",
        "Time from an aborted request's entry into the queue to its abort.",
    ),
    # Engine steps.
    _histogram(
        "iteration_interval_seconds",
        "steps[].interval",
        "iteration_duration",
        "Time from the output of one iteration to the output of the next, including idle time.",
    ),
    _histogram(
        "iteration_prefill_requests",
        "steps[].prefill_requests",
        "iteration_requests",
        "Requests of an iteration in prefill; after a preemption, a request is in prefill again.",
    ),
    _histogram(
        "iteration_prefill_tokens",
        "steps[].prefill_tokens",
        "iteration_tokens",
        "Tokens scheduled in an iteration for requests in prefill.",
    ),
    _histogram(
        "iteration_decode_requests",
        "steps[].decode_requests",
        "iteration_requests",
        "Requests of an iteration in decode.",
    ),
    _histogram(
        "iteration_decode_tokens",
        "steps[].decode_tokens",
        "iteration_tokens",
        "Tokens scheduled in an iteration for requests in decode, including draft tokens.",
    ),
    _histogram(
        "iteration_kv_tokens",
        "steps[].kv_tokens",
        "held_tokens",
        "Tokens whose KV was computed before an iteration for its requests, and which attention reads.",
    ),
    _histogram(
        "iteration_waiting_tokens",
        "steps[].waiting_tokens",
        "held_tokens",
        "Tokens of the requests that waited during an iteration.",
    ),
    # KV blocks: values that the engine's own three families do not have.
    _histogram(
        "kv_block_reuse_gap_seconds",
        Handler("kv_block_gaps"),
        "kv_cache_residency",
        "Time between consecutive prefix hits on a sampled KV block; all hits count.",
    ),
    _histogram(
        "kv_block_reuses",
        Handler("kv_block_reuses"),
        "reuses",
        "Prefix hits on a sampled KV block from its allocation until its eviction.",
    ),
    _histogram(
        "kv_block_reset_age_seconds",
        Handler("kv_block_reset_ages"),
        "kv_cache_residency",
        "Age of a sampled KV block when the prefix cache was reset.",
    ),
    _histogram(
        "kv_block_reset_idle_seconds",
        Handler("kv_block_reset_idles"),
        "kv_cache_residency",
        "Time since a sampled KV block's last prefix hit when the prefix cache was reset.",
    ),
    _row(
        "kv_cache_resets_total",
        "counter",
        Handler("kv_cache_resets"),
        "Resets of the prefix cache.",
    ),
    _row(
        "kv_sample_ratio",
        "gauge",
        Computed("kv_sample_ratio"),
        "Share of KV blocks whose lifetime is tracked, by the engine itself or by the tap.",
        combine="mean",
        feature="",
    ),
    _row(
        "kv_tracked_blocks",
        "gauge",
        Computed("kv_tracked_blocks"),
        "KV blocks whose lifetime is tracked now, or is not yet observed.",
        feature="",
    ),
    _row(
        "kv_sample_halvings_total",
        "counter",
        Handler("kv_sample_halvings"),
        "Times the share of tracked KV blocks was halved because there were too many.",
    ),
    _row(
        "kv_abandoned_blocks_total",
        "counter",
        Handler("kv_abandoned_blocks"),
        "Tracked KV blocks whose eviction was never reported; their lifetimes are in no histogram.",
    ),
    _row(
        "kv_unknown_events_total",
        "counter",
        Handler("kv_unknown_events"),
        "Events of KV blocks that should have been tracked and were not, or that were out of order.",
    ),
    # The engine's processes: prometheus_client exposes none in multiprocess mode.
    _process("cpu_seconds_total", "counter", "CPU time of a process of the engine."),
    _process("resident_memory_bytes", "gauge", "Resident memory of a process of the engine."),
    _process("open_fds", "gauge", "Open file descriptors of a process of the engine."),
    _process("max_fds", "gauge", "File descriptors that a process of the engine may open."),
    _process("threads", "gauge", "Threads of a process of the engine."),
    _process(
        "start_time_seconds",
        "gauge",
        "Unix time when a process of the engine started.",
        combine="max",
    ),
    _process(
        "gc_collections_total",
        "counter",
        "Runs of Python's cyclic garbage collector in a process of the engine.",
        "generation",
    ),
    _process(
        "gc_uncollectable_total",
        "counter",
        "Objects that Python's cyclic garbage collector found and could not free.",
        "generation",
    ),
)
