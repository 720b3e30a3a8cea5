"""Rows of Triton: its own families that the statistics extension can feed, and further ones.

A source is a path below ``wire.ModelStats``, whose fields are the extension's. Triton names its
counters without ``_total`` and exposes microseconds; the statistics, and so the stored values, are
nanoseconds. An engine of this dialect is one version of a model, or the server itself.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from sidestep.catalog.row import Handler, Row
from sidestep.engines.row_builders import SampledRows, counter, gauge, histogram

MODEL = ("model", "version")
"""The labels of a model's version, as on Triton's own page."""
FAILURES = "failures"
"""Feature: Triton's own page, which has failed requests by reason, is not merged."""
CACHE = "response_cache"
RESPONSES = "response_stats"
EXECUTES = "executes"
"""Feature: the model executes itself; an ensemble's executions are its members'."""
REFUSED = "refused_observations"

STATES = ("up", "stale", "down")
STAGES = (
    "request", "failure", "queue", "compute_input", "compute_infer", "compute_output",
    "cache_hit", "cache_miss", "execution", "first_response", "next_response",
)  # fmt: skip
MICROSECONDS, SECONDS = 1000, 1_000_000_000
"""Nanoseconds of a microsecond, and of a second."""
BATCH_STAGES = ("compute_input", "compute_infer", "compute_output")
RESPONSE_STAGES = BATCH_STAGES[1:]
MILLISECONDS = 1000
"""Milliseconds of a second."""


_counter, _gauge, _histogram = (
    functools.partial(kind, shared=MODEL) for kind in (counter, gauge, histogram)
)
_SERVER = SampledRows("sidestep_triton_", shared=())


def _responses(name: str, field: str, text: str, unit_divisor: int = 1) -> Row:
    paths: Mapping[str, str] = {
        "first": f"response_stats.first.{field}",
        "next": f"response_stats.next.{field}",
        "fail": f"response_stats.fail.{field}",
        "empty": f"response_stats.empty_response.{field}",
        "cancel": f"response_stats.cancel.{field}",
    }
    return _counter(
        f"sidestep_triton_{name}",
        paths,
        text,
        own=("response",),
        closed=tuple(paths),
        unit_divisor=unit_divisor,
        feature=RESPONSES,
    )


# The table is laid out by hand: name above text, two lines a row.
# fmt: off
ROWS: tuple[Row, ...] = (
    _counter("nv_inference_request_success", "inference_stats.success.count",
             "Requests that succeeded, including those answered by the response cache."),
    _counter("nv_inference_request_failure", "inference_stats.fail.count",
             "Requests that failed, for any reason. Like Triton, this counts neither requests that"
             " a full queue rejects nor error responses of a Python model.", feature=FAILURES),
    _counter("nv_inference_count", "inference_count",
             "Inferences that succeeded: a request of batch size n counts n, an answer of the"
             " response cache 0."),
    _counter("nv_inference_exec_count", "execution_count",
             "Executions of the model, each of one batch, including those that failed."),
    _counter("nv_inference_request_duration_us", "inference_stats.success.ns",
             "Duration of successful requests, in microseconds.", unit_divisor=MICROSECONDS),
    _counter("nv_inference_queue_duration_us", "inference_stats.queue.ns",
             "Time that successful requests waited in the scheduler, in microseconds.",
             unit_divisor=MICROSECONDS),
    _counter("nv_inference_compute_input_duration_us", "inference_stats.compute_input.ns",
             "Time to prepare inputs, in microseconds; a batch's time counts in full for each"
             " request.", unit_divisor=MICROSECONDS),
    _counter("nv_inference_compute_infer_duration_us", "inference_stats.compute_infer.ns",
             "Time to run the model, in microseconds; a batch's time counts in full for each"
             " request.", unit_divisor=MICROSECONDS),
    _counter("nv_inference_compute_output_duration_us", "inference_stats.compute_output.ns",
             "Time to extract outputs, in microseconds; a batch's time counts in full for each"
             " request.", unit_divisor=MICROSECONDS),
    _counter("nv_cache_num_hits_per_model", "inference_stats.cache_hit.count",
             "Requests that the response cache answered.", feature=CACHE),
    _counter("nv_cache_hit_duration_per_model", "inference_stats.cache_hit.ns",
             "Time to find and copy answers of the response cache, in microseconds.",
             unit_divisor=MICROSECONDS, feature=CACHE),
    _counter("nv_cache_num_misses_per_model", "inference_stats.cache_miss.count",
             "Requests that the response cache could not answer.", feature=CACHE),
    _counter("nv_cache_miss_duration_per_model", "inference_stats.cache_miss.ns",
             "Time to look up and store answers that the response cache did not have, in"
             " microseconds.", unit_divisor=MICROSECONDS, feature=CACHE),
    # Statistics that Triton's own page does not have.
    _counter("sidestep_triton_failed_requests_total", "inference_stats.fail.count",
             "Requests that failed, for any reason."),
    _counter("sidestep_triton_failed_request_seconds_total", "inference_stats.fail.ns",
             "Time of requests that failed.", unit_divisor=SECONDS),
    _histogram("sidestep_triton_batch_size", Handler("batch_size"),
               "Executions by batch size; exact, since Triton counts each size.",
               buckets="triton_batch_size"),
    _counter("sidestep_triton_batch_executions_total", Handler("batch_executions"),
             "Executions of each batch size.", own=("batch_size",)),
    _counter("sidestep_triton_batch_seconds_total", Handler("batch_duration"),
             "Time of executions of each batch size: input, model and output.",
             own=("batch_size",), unit_divisor=SECONDS),
    _counter("sidestep_triton_batch_stage_seconds_total", Handler("batch_stages"),
             "Time of executions of each batch size by stage; the 21st size of a model and all"
             " later ones are `__other__`.", own=("batch_size", "stage"), unit_divisor=SECONDS),
    _counter("sidestep_triton_busy_seconds_total", "busy_ns",
             "Time that instances of the model were executing; absent for ensembles, whose"
             " executions count for their members.", unit_divisor=SECONDS, feature=EXECUTES),
    _gauge("sidestep_triton_busy_ratio", Handler("busy_ratio"),
           "Share of the time between two polls that the model's instances were executing. It can"
           " exceed 1, since an execution counts in full when it ends.", combine="mean"),
    _gauge("sidestep_triton_instances", Handler("instances"),
           "Executions of the model that can run at once, according to its configuration."),
    _gauge("sidestep_triton_interval_mean_seconds", Handler("means"),
           "Mean duration of a stage over what ended between two polls; no sample if nothing"
           " ended. A mean hides the slowest requests.", own=("stage",), closed=STAGES,
           combine="mean"),
    _responses("responses_total", "count",
               "Responses by position in their request and outcome; first and next were"
               " successful."),
    _responses("response_seconds_total", "ns",
               "Time of responses: of the first from the start of its request's computation, of"
               " every other one from the previous response.", unit_divisor=SECONDS),
    _counter("sidestep_triton_response_stages_total", Handler("response_stages"),
             "Stages of responses that ended, whatever the outcome, by position of the response in"
             " its request: `first` or `next`.", own=("response", "stage"), feature=RESPONSES),
    _counter("sidestep_triton_response_stage_seconds_total", Handler("response_durations"),
             "Time of these stages: to compute a response, and to extract its output.",
             own=("response", "stage"), unit_divisor=SECONDS, feature=RESPONSES),
    _gauge("sidestep_triton_memory_bytes", Handler("memory"),
           "Memory that the backend reported to use when it loaded the model.", own=("id", "type")),
    _gauge("sidestep_triton_last_inference_timestamp_seconds", "last_inference",
           "Unix time of the last execution, by the server's clock; 0 if there was none since the"
           " model was loaded.", combine="max", unit_divisor=MILLISECONDS),
    _gauge("sidestep_triton_idle_seconds", Handler("idle"),
           "Time since the last execution, by both hosts' clocks; no sample if there was none since the model was"
           " loaded.", combine="min"),
    _counter("sidestep_triton_resets_total", Handler("resets"),
             "Resets of the server's statistics, by a restart, a reload or another version."),
    # The server itself.
    _SERVER.gauge("state",
                  "1 for the current state of the server according to polls; a stale server is"
                  " slow to answer.", "state", closed=STATES, combine="max"),
    _SERVER.counter("polls_total", "Polls by outcome.", "outcome"),
    _SERVER.histogram("poll_duration_seconds",
                      "Duration of a poll for statistics.", "triton_poll_duration"),
    _SERVER.gauge("model_versions", "Versions of models that are ready."),
    counter("sidestep_triton_refused_observations_total", Handler(REFUSED),
            "Observations that were refused because they were negative or not a number.",
            shared=(), feature=REFUSED),
)
# fmt: on

FROM_STATISTICS = frozenset(
    row.name for row in ROWS if row.name.startswith("nv_") and row.feature != FAILURES
)
"""Triton's own families that come from statistics even where Triton's page is merged, too."""
