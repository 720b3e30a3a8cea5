"""Rows that several dialects have, under the same names.

Arguments of the functions that are not named here are those of all their rows, as in ``row_builders.row``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from sidestep.catalog.prices import PARTS, PRICED
from sidestep.catalog.row import Computed, Handler, Row, Sampled, Source
from sidestep.catalog.slo import SLO_HANDLERS, SLO_REQUESTS, SLO_UNDECIDED
from sidestep.engines.row_builders import counter, gauge, histogram
from sidestep.metrics.ended_counter import REQUEST_PARTS, SERVICE_E2E, SERVICE_TTFT, TENANT_PARTS
from sidestep.metrics.hit_ratio_curves import HIT_RATIOS
from sidestep.metrics.registry import COST, TENANT
from sidestep.protocol.request_events import LIMITS
from sidestep.tracking.kv_blocks.lookups import REASONS

# The tables are laid out by hand: name above text, two lines a row.
# fmt: off
MAX_RUNNING_REQUESTS = "sidestep_max_running_requests"
"""Gauge of the most requests that fit into an engine's batch."""
SERVICE_REQUESTS, SERVICE_PROMPT, SERVICE_GENERATED, RECEIVED_PROMPT = (
    "sidestep_service_requests_total",
    "sidestep_service_prompt_tokens_total",
    "sidestep_service_generation_tokens_total",
    "sidestep_received_prompt_tokens_total",
)
SERVICE_HANDLERS = tuple(
    name.removeprefix("sidestep_").removesuffix("_total")
    for name in (SERVICE_REQUESTS, SERVICE_PROMPT, SERVICE_GENERATED)
)
REFUSED_OBSERVATIONS = counter("sidestep_refused_observations_total",
                               Handler("refused_observations"),
                               "Observations that were refused because they were negative (the"
                               " host's wall clock stepped back) or not a number.")


def saturation(**more: Any) -> tuple[Row, ...]:
    """Return the rows of the saturation, for a dialect with ``KeySeries.begun``."""
    built = functools.partial(gauge, combine="max", **more)
    return (
        built("sidestep_saturation_ratio", Computed("saturation"),
              "Offered load divided by the load that the engine can serve; from 1 on, its queue"
              " grows. No sample in the first minute."),
        built("sidestep_shortest_step_seconds", Computed("shortest_step"),
              "Shortest time per step of the last 12 to 24 hours, which sidestep_saturation_ratio"
              " takes for the part of a step that costs the same whatever the batch."),
        built("sidestep_shortest_step_timestamp_seconds", Computed("shortest_step_time"),
              "Unix time at which sidestep_shortest_step_seconds was measured."),
    )


def step_limits(
    seconds: Source, steps: Source, *, unit_divisor: int = 1, **more: Any
) -> tuple[Row, ...]:
    """Return the rows of the limits on what an engine admits, which come from ``seconds`` and ``steps``."""
    built = functools.partial(counter, own=("limit",), closed=LIMITS, **more)
    return (
        built("sidestep_step_limit_seconds_total", seconds,
              "Time in which the engine had unfinished requests, by what kept the next waiting"
              " request from the batch: none, no request waited; slots, the batch had its most"
              " requests (max_num_seqs, max_running_requests); tokens, the step had its most tokens"
              " (max_num_batched_tokens, max_prefill_tokens, chunked_prefill_size); kv_blocks, the"
              " KV cache was full; lora, the batch had its most adapters (max_loras,"
              " max_loras_per_batch); grammar, kv_transfer, encoder: it waited for its compiled"
              " grammar, for KV from elsewhere, or for the multimodal encoder; paused, by an"
              " operator; deferred, for any other reason. A limit holds from the scheduling of a"
              " step to that of the next; idle time counts nowhere.", unit_divisor=unit_divisor),
        built("sidestep_steps_total", steps,
              "Steps with at least one request, by what kept the next waiting request from the"
              " batch when the step was scheduled; sidestep_step_limit_seconds_total has the"
              " limits."),
    )


def backlog(prompt: Source, prefill: Source, **more: Any) -> tuple[Row, ...]:
    """Return the rows of the tokens that are still to be prefilled."""
    built = functools.partial(gauge, **more)
    return (
        built("sidestep_waiting_prompt_tokens", prompt,
              "Prompt tokens of the requests that wait for a place in the batch, also of preempted"
              " ones. What a cache has of them is included."),
        built("sidestep_unfinished_prefill_tokens", prefill,
              "Tokens that are still to be prefilled: those of waiting requests, with what a"
              " preempted one has generated, and of requests in the batch what no step has computed"
              " yet. What a cache has of a prompt is included until its prefill ends."),
    )


def uncached_backlog(**more: Any) -> Row:
    """Return the row of the waiting tokens that no cache has, of an engine that looks them up early."""
    return gauge("sidestep_waiting_uncached_tokens", Sampled(),
                 "Tokens of waiting requests that the prefix cache did not have when the engine last"
                 " looked them up; a request that it has not looked up counts whole.", **more)


def objectives(**more: Any) -> tuple[Row, ...]:
    """Return the rows of the counters of ``--slo``, for a dialect with ``latencies``."""
    return (
        counter(SLO_REQUESTS, Handler(SLO_HANDLERS[0]),
                "Requests by whether they meet an objective of --slo: good is at most its"
                " threshold. An objective of inter-token latency counts gaps between tokens"
                " instead.", own=("result", "slo"), **more),
        counter(SLO_UNDECIDED, Handler(SLO_HANDLERS[1]),
                "Requests in neither result of sidestep_slo_requests_total: they arrived as bucket"
                " counts, and the objective's threshold lies inside their bucket.", own=("slo",), **more),
    )


def goodput(**more: Any) -> tuple[Row, ...]:
    """Return the rows of the requests that met all objectives, for a dialect that sends requests.

    ``requests.request_log`` feeds them.
    """
    built = functools.partial(counter, **more)
    return (
        built("sidestep_goodput_requests_total", Handler("goodput_requests"),
              "Requests that met all objectives of --slo: served, and every latency within its"
              " threshold."),
        built("sidestep_goodput_tokens_total", Handler("goodput_tokens"),
              "Generated tokens of the requests in sidestep_goodput_requests_total."),
        built("sidestep_tenant_goodput_requests_total", Handler("tenant_goodput_requests"),
              "Requests that met all objectives of --slo, by tenant.", own=(TENANT,)),
        built("sidestep_tenant_goodput_tokens_total", Handler("tenant_goodput_tokens"),
              "Generated tokens of the requests that met all objectives of --slo, by tenant.",
              own=(TENANT,)),
    )


def service(
    reasons: tuple[str, ...], buckets: tuple[str, str], *, feature: str = "", **more: Any
) -> tuple[Row, ...]:
    """Return the rows whose sums over engines are those of the service, for a dialect with ``reasons``.

    Only engines that send requests have the latencies (``feature``), in ``buckets``: TTFT's and e2e's.
    """
    requests, prompt, generated = map(Handler, SERVICE_HANDLERS)
    built = functools.partial(counter, **more)
    waited = functools.partial(histogram, feature=feature, **more)
    return (
        built(SERVICE_REQUESTS, requests,
              "Requests that ended, each once in all engines: where prefill and decode are separate,"
              " at the engine that generates.", own=("reason",), closed=reasons),
        built(SERVICE_PROMPT, prompt,
              "Prompt tokens, each once in all engines: where prefill and decode are separate, at the"
              " engine that computes the prompt. cached: a cache had their KV.", own=("source",),
              closed=("computed", "cached")),
        built(SERVICE_GENERATED, generated,
              "Generated tokens, each once in all engines: without those of a request that another"
              " engine continues, which generates them again."),
        waited("sidestep_service_time_to_first_token_seconds", Handler(SERVICE_TTFT),
               "Time to first token of the requests in sidestep_service_requests_total, observed at"
               " their end; from the arrival at the engine that computes the prompt, where the"
               " exporter knows both parts of a request.", buckets=buckets[0]),
        waited("sidestep_service_e2e_request_latency_seconds", Handler(SERVICE_E2E),
               "Time from arrival to end of the requests in sidestep_service_requests_total that were"
               " served; as in sidestep_service_time_to_first_token_seconds.",
               buckets=buckets[1]),
    )


def request_parts(**more: Any) -> tuple[Row, Row]:
    """Return the rows of where requests' time went, for a dialect that sends requests."""
    made = counter("sidestep_request_part_seconds_total", Handler(REQUEST_PARTS),
                   "End-to-end latency of requests that ended, aborted ones included, divided into"
                   " parts that sum to it; time in the queue also by the limit that held meanwhile."
                   " Without requests whose beginning is unknown.", own=("limit", "part"), **more)
    by_tenant = counter("sidestep_tenant_request_part_seconds_total", Handler(TENANT_PARTS),
                        "End-to-end latency of requests that ended, divided into parts, by tenant.",
                        own=("part", TENANT), **more)
    return dataclasses.replace(made, omits_empty_labels=True), by_tenant


def lookups(**more: Any) -> tuple[Row, ...]:
    """Return the rows of lookups in the prefix cache, for a dialect that sends ``CacheLookups``.

    They are exposed once there is such an item.
    """
    built = functools.partial(gauge, feature="kv_lookups", combine="mean", **more)
    return (
        built("sidestep_kv_whatif_hit_ratio", Handler(HIT_RATIOS),
              "Share of looked-up tokens that a prefix cache of another size would find, in sizes"
              " of the present one; estimated from sampled blocks.", own=("capacity",)),
        built("sidestep_kv_whatif_shared_hit_ratio", Computed("whatif_shared_hit_ratio"),
              "Share of looked-up tokens that would be found if this engine's requests could use"
              " the prefix caches of all engines of its model: what routing by prefix can win."),
        built("sidestep_kv_whatif_hit_ratio_per_gib", Computed("whatif_hit_ratio_per_gib"),
              "What one more GiB of KV cache would add to the hit ratio."),
        built("sidestep_kv_whatif_sufficient_blocks", Computed("whatif_sufficient_blocks"),
              "Blocks of the smallest prefix cache whose hit ratio is within one point of the"
              " best.", combine="sum"),
        built("sidestep_kv_working_set_blocks", Computed("kv_working_set_blocks"),
              "Blocks that requests used within the last half-life (--kv.curve-half-life),"
              " estimated.", combine="sum"),
        counter("sidestep_kv_missed_tokens_total", Handler("kv_missed_tokens"),
                "Looked-up tokens that the prefix cache did not have, by reason; estimated from"
                " sampled blocks. cold: not used before; evicted, cleared: used before;"
                " in_progress: another request was computing them; unknown: the exporter has not"
                " seen enough; too_short: in no full block that can be found; not_cacheable: the"
                " request may not read the cache.", own=("reason",), closed=REASONS,
                feature="kv_lookups", **more),
        histogram("sidestep_kv_missed_block_idle_seconds", Handler("kv_missed_idle"),
                  "Time since the last use of a block that was looked up and had been evicted.",
                  buckets="kv_cache_residency", feature="kv_lookups", **more),
    )


def cost(**more: Any) -> tuple[Row, ...]:
    """Return the rows of the cost of tokens, by engine and by tenant."""
    built = functools.partial(counter, unit_divisor=PARTS, feature=PRICED, **more)
    return (
        built("sidestep_cost_total", Handler(COST),
              "Cost of prompt tokens and generated tokens, in the currency of --prices.model."),
        built("sidestep_tenant_cost_total", Handler("tenant_cost"),
              "Cost of tokens, in the currency of --prices.model, by tenant.", own=(TENANT,)),
    )


def tenants(**more: Any) -> tuple[Row, ...]:
    """Return the rows of the counters by tenant, for a dialect that sends requests."""
    built = functools.partial(counter, own=(TENANT,), **more)
    return (
        built("sidestep_tenant_requests_total", Handler("tenant_requests"),
              "Requests that ended, by tenant."),
        built("sidestep_tenant_failed_requests_total", Handler("tenant_failed_requests"),
              "Requests that ended by an abort or an error, by tenant."),
        built("sidestep_tenant_prompt_tokens_total", Handler("tenant_computed_tokens"),
              "Prompt tokens whose KV was computed, by tenant."),
        built("sidestep_tenant_cached_prompt_tokens_total", Handler("tenant_cached_tokens"),
              "Prompt tokens whose KV came from a cache, by tenant."),
        built("sidestep_tenant_transferred_prompt_tokens_total", Handler("tenant_transferred_tokens"),
              "Prompt tokens whose KV came from the engine that counts them, by tenant."),
        built("sidestep_tenant_generation_tokens_total", Handler("tenant_generated_tokens"),
              "Generated tokens, by tenant."),
        built("sidestep_tenant_queue_seconds_total", Handler("tenant_queue_seconds"),
              "Seconds that requests which ended had waited in the queue, by tenant."),
        built("sidestep_tenant_compute_seconds_total", Handler("tenant_compute_seconds"),
              "Seconds from the batch to the last output of requests which ended, by tenant."),
    )
# fmt: on
