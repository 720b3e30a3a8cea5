"""Triton's families that its statistics extension can feed, and what only that knows.

A source is a path below ``wire.triton.ModelStats``, whose fields are the extension's. Triton
names its counters without ``_total`` and has microseconds; statistics have nanoseconds, which
are kept. An engine of this dialect is one version of a model, or the server itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from sidestep.catalog.model import Combine, Handler, Kind, Row, Sampled, Source

MODEL = ("model", "version")
"""What tells the versions of models apart, as on Triton's own page."""
FAILURES = "failures"
"""Nobody else shows failed requests, by reason: Triton's own page can."""
CACHE = "response_cache"
RESPONSES = "response_stats"
EXECUTES = "executes"
"""Its executions are its own; those of an ensemble are its members'."""
REFUSED = "refused_observations"

STATES = ("up", "stale", "down")
STAGES = (
    "request", "failure", "queue", "compute_input", "compute_infer", "compute_output",
    "cache_hit", "cache_miss", "execution", "first_response", "next_response",
)  # fmt: skip
MICROSECONDS, SECONDS = 1000, 1_000_000_000
"""Nanoseconds of one."""
MILLISECONDS = 1000
"""Of a second."""


def _row(
    name: str,
    kind: Kind,
    source: Source,
    text: str,
    *,
    own: tuple[str, ...] = (),
    closed: tuple[str, ...] = (),
    buckets: str = "",
    combine: Combine = "sum",
    unit_divisor: int = 1,
    feature: str = "",
) -> Row:
    return Row(
        name=name,
        kind=kind,
        source=source,
        help=text,
        labels=tuple(sorted((*MODEL, *own))),
        shared=MODEL,
        closed=closed,
        buckets=buckets,
        combine=combine,
        unit_divisor=unit_divisor,
        feature=feature,
    )


def _counted(name: str, source: str, text: str, feature: str = "") -> Row:
    return _row(name, "counter", source, text, feature=feature)


def _timed(name: str, source: str, text: str, feature: str = "") -> Row:
    return _row(name, "counter", source, text, unit_divisor=MICROSECONDS, feature=feature)


def _gauge(name: str, source: Source, text: str, combine: Combine, feature: str = "") -> Row:
    return _row(f"sidestep_triton_{name}", "gauge", source, text, combine=combine, feature=feature)


def _responses(name: str, field: str, text: str, unit_divisor: int = 1) -> Row:
    paths: Mapping[str, str] = {
        "first": f"response_stats.first.{field}",
        "next": f"response_stats.next.{field}",
        "fail": f"response_stats.fail.{field}",
        "empty": f"response_stats.empty_response.{field}",
        "cancel": f"response_stats.cancel.{field}",
    }
    return _row(
        f"sidestep_triton_{name}",
        "counter",
        paths,
        text,
        own=("response",),
        closed=tuple(paths),
        unit_divisor=unit_divisor,
        feature=RESPONSES,
    )


def _of_server(
    name: str,
    kind: Kind,
    text: str,
    *,
    own: tuple[str, ...] = (),
    closed: tuple[str, ...] = (),
    buckets: str = "",
    combine: Combine = "sum",
) -> Row:
    return Row(
        name=f"sidestep_triton_{name}",
        kind=kind,
        source=Sampled(),
        help=text,
        labels=own,
        shared=(),
        closed=closed,
        buckets=buckets,
        combine=combine,
    )


ROWS: tuple[Row, ...] = (
    _counted(
        "nv_inference_request_success",
        "inference_stats.success.count",
        "Requests that succeeded, answers of the response cache among them.",
    ),
    _counted(
        "nv_inference_request_failure",
        "inference_stats.fail.count",
        "Requests that failed, for whatever reason. Neither requests that a full queue turns"
        " away nor error responses of a Python model are among them, here or in Triton.",
        FAILURES,
    ),
    _counted(
        "nv_inference_count",
        "inference_count",
        "Inferences that succeeded: a request of batch size n is n of them, an answer of the"
        " response cache none.",
    ),
    _counted(
        "nv_inference_exec_count",
        "execution_count",
        "Executions of the model, each of one batch; those that failed are counted, too.",
    ),
    _timed(
        "nv_inference_request_duration_us",
        "inference_stats.success.ns",
        "Microseconds of successful requests.",
    ),
    _timed(
        "nv_inference_queue_duration_us",
        "inference_stats.queue.ns",
        "Microseconds that successful requests waited in the scheduler.",
    ),
    _timed(
        "nv_inference_compute_input_duration_us",
        "inference_stats.compute_input.ns",
        "Microseconds of preparing inputs, the batch's in full for each of its requests.",
    ),
    _timed(
        "nv_inference_compute_infer_duration_us",
        "inference_stats.compute_infer.ns",
        "Microseconds of running the model, the batch's in full for each of its requests.",
    ),
    _timed(
        "nv_inference_compute_output_duration_us",
        "inference_stats.compute_output.ns",
        "Microseconds of extracting outputs, the batch's in full for each of its requests.",
    ),
    _counted(
        "nv_cache_num_hits_per_model",
        "inference_stats.cache_hit.count",
        "Requests that the response cache answered.",
        CACHE,
    ),
    _timed(
        "nv_cache_hit_duration_per_model",
        "inference_stats.cache_hit.ns",
        "Microseconds of finding and copying answers of the response cache.",
        CACHE,
    ),
    _counted(
        "nv_cache_num_misses_per_model",
        "inference_stats.cache_miss.count",
        "Requests that the response cache could not answer.",
        CACHE,
    ),
    _timed(
        "nv_cache_miss_duration_per_model",
        "inference_stats.cache_miss.ns",
        "Microseconds of looking up and storing what the response cache did not have.",
        CACHE,
    ),
    # What Triton exports nowhere.
    _counted(
        "sidestep_triton_failed_requests_total",
        "inference_stats.fail.count",
        "Requests that failed, for whatever reason.",
    ),
    _row(
        "sidestep_triton_failed_request_seconds_total",
        "counter",
        "inference_stats.fail.ns",
        "Time of requests that failed.",
        unit_divisor=SECONDS,
    ),
    _row(
        "sidestep_triton_batch_size",
        "histogram",
        Handler("batch_size"),
        "Executions by the size of their batch, exactly: Triton counts each size.",
        buckets="triton_batch_size",
    ),
    _row(
        "sidestep_triton_batch_executions_total",
        "counter",
        Handler("batch_executions"),
        "Executions of each batch size.",
        own=("batch_size",),
    ),
    _row(
        "sidestep_triton_batch_seconds_total",
        "counter",
        Handler("batch_duration"),
        "Time of executions of each batch size: input, model and output.",
        own=("batch_size",),
        unit_divisor=SECONDS,
    ),
    _row(
        "sidestep_triton_busy_seconds_total",
        "counter",
        "busy_ns",
        "Time that instances of the model were executing, each execution once; not of ensembles,"
        " whose executions are their members'.",
        unit_divisor=SECONDS,
        feature=EXECUTES,
    ),
    _gauge(
        "busy_ratio",
        Handler("busy_ratio"),
        "Share of the time between two polls that the model's instances were executing. An"
        " execution counts when it ends, so one that is longer can make it more than 1.",
        "mean",
    ),
    _gauge(
        "instances",
        Handler("instances"),
        "Executions of the model that can run at once, by its configuration.",
        "sum",
    ),
    _row(
        "sidestep_triton_interval_mean_seconds",
        "gauge",
        Handler("means"),
        "Mean of what ended between two polls, by stage; no sample where nothing did. A mean is"
        " no distribution: it hides the slowest.",
        own=("stage",),
        closed=STAGES,
        combine="mean",
    ),
    _responses(
        "responses_total",
        "count",
        "Responses, by their place in the request and how they ended; first and next were good.",
    ),
    _responses(
        "response_seconds_total",
        "ns",
        "Time of responses, the first from the begin of its request's computation and each other"
        " from the one before.",
        unit_divisor=SECONDS,
    ),
    _row(
        "sidestep_triton_memory_bytes",
        "gauge",
        Handler("memory"),
        "Memory that the backend said it took when it loaded the model.",
        own=("id", "type"),
    ),
    _row(
        "sidestep_triton_last_inference_timestamp_seconds",
        "gauge",
        "last_inference",
        "Unix time of the last execution, by the server's clock; 0: none since it was loaded.",
        combine="max",
        unit_divisor=MILLISECONDS,
    ),
    _gauge(
        "idle_seconds",
        Handler("idle"),
        "Since the last execution; no sample where there was none since it was loaded.",
        "min",
    ),
    _row(
        "sidestep_triton_resets_total",
        "counter",
        Handler("resets"),
        "Times that the server began to count anew: a restart, a reload, or another version.",
    ),
    # The server itself.
    _of_server(
        "state",
        "gauge",
        "1 for the state of the server as polls find it: stale is one that is slow to answer.",
        own=("state",),
        closed=STATES,
        combine="max",
    ),
    _of_server("polls_total", "counter", "Polls, by what came of them.", own=("outcome",)),
    _of_server(
        "poll_duration_seconds",
        "histogram",
        "From asking for statistics until they were there.",
        buckets="triton_poll_duration",
    ),
    _of_server("model_versions", "gauge", "Versions of models that are ready."),
    Row(
        name="sidestep_triton_refused_observations_total",
        kind="counter",
        source=Handler(REFUSED),
        help="Observations left out: not a number, or negative.",
        labels=(),
        shared=(),
        feature=REFUSED,
    ),
)

FED = frozenset(row.name for row in ROWS if row.name.startswith("nv_") and row.feature != FAILURES)
"""Triton's own families that come from statistics even where its page is passed on."""
