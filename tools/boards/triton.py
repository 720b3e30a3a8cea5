"""The Triton dashboard: requests, their stages, batches, responses, and the polls."""

from __future__ import annotations

from tools.boards import reasons
from tools.boards.colors import SERVERS
from tools.boards.dashboard import TARGET, Annotation, Dashboard, Row, Variable
from tools.boards.panels import Panel, Query
from tools.boards.queries import Histogram, Scope, grown, most, rate, ratio, total
from tools.boards.shapes import heat, lines, quantiles, tile

of = Scope("model", "version")
server = Scope()
MODEL = ("model", "version")
NAME = "{{model}} version {{version}}"
MICRO = 1e-6
STAGES = {
    "queue": "nv_inference_queue_duration_us",
    "input": "nv_inference_compute_input_duration_us",
    "model": "nv_inference_compute_infer_duration_us",
    "output": "nv_inference_compute_output_duration_us",
}
SUCCESS = "nv_inference_request_success"
BATCHES = Histogram(of, "sidestep_triton_batch_size")
POLLS = Histogram(server, "sidestep_triton_poll_duration_seconds")


def mean_time(family: str, by: tuple[str, ...] | str = "") -> str:
    """Return seconds per request; Triton counts microseconds."""
    return f"{ratio(rate(of(family), by), rate(of(SUCCESS), by))} * {MICRO:.0e}"


def by_stage(seconds: str, executions: str) -> str:
    """Return seconds of each stage per execution."""
    return f"{seconds} / on () group_left () ({executions} > 0)"


TILES = (
    tile(
        "Requests",
        "Successful requests per second.",
        reasons.TRITON,
        rate(of(SUCCESS)),
        unit="reqps",
    ),
    tile(
        "Failed",
        "Share of requests that failed.",
        reasons.NO_TRITON_TRAFFIC,
        ratio(
            rate(of("sidestep_triton_failed_requests_total")),
            f"({rate(of(SUCCESS))} + {rate(of('sidestep_triton_failed_requests_total'))})",
        ),
        unit="percentunit",
        limits=(0.001, 0.01),
    ),
    tile(
        "Inferences",
        "Inferences per second: a request with a batch of 4 is 4.",
        reasons.TRITON,
        rate(of("nv_inference_count")),
        unit="cps",
    ),
    tile(
        "Batch size, mean",
        "Inferences of an execution.",
        reasons.NO_TRITON_TRAFFIC,
        ratio(rate(of("nv_inference_count")), rate(of("nv_inference_exec_count"))),
    ),
    tile(
        "Request latency, mean",
        "Mean time of a request in the server; Triton has no distribution of it.",
        reasons.NO_TRITON_TRAFFIC,
        mean_time("nv_inference_request_duration_us"),
        unit="s",
    ),
    tile(
        "Pending",
        "Requests that wait for an instance.",
        reasons.PENDING,
        total(of("nv_inference_pending_request_count")),
    ),
    tile(
        "Ready",
        "Versions of models that are ready.",
        reasons.TRITON,
        total(server("sidestep_triton_model_versions")),
    ),
    tile(
        "Servers down or slow",
        "Servers that polls cannot reach, or that are slow to respond.",
        reasons.TRITON,
        total(server("sidestep_triton_state", state="~down|stale")),
        limits=(1, 1),
    ),
)

REQUESTS = (
    lines(
        "Requests",
        "Successful requests per second.",
        reasons.TRITON,
        Query(rate(of(SUCCESS), MODEL), NAME),
        unit="reqps",
    ),
    lines(
        "Failures",
        "Failed requests per second, by reason if Triton's own page is polled.",
        reasons.TRITON,
        Query(rate(of("sidestep_triton_failed_requests_total"), MODEL), NAME),
        Query(rate(of("nv_inference_request_failure"), "reason"), "all models {{reason}}"),
        unit="reqps",
    ),
    lines(
        "Pending",
        "Requests that wait for an instance.",
        reasons.PENDING,
        Query(total(of("nv_inference_pending_request_count"), MODEL), NAME),
    ),
)

TIME = (
    lines(
        "Request latency, mean",
        "Whole time in the server; the queue is part of it.",
        reasons.NO_TRITON_TRAFFIC,
        Query(mean_time("nv_inference_request_duration_us", MODEL), NAME),
        unit="s",
    ),
    lines(
        "Time by stage, mean",
        "Time of a request in the queue, in preparing inputs, in the model, and in outputs.",
        reasons.NO_TRITON_TRAFFIC,
        *(Query(mean_time(family), name) for name, family in STAGES.items()),
        unit="s",
        stacked=True,
    ),
    lines(
        "Between two polls, mean",
        (
            "Mean of the requests that ended between the last two polls, by stage; of the slowest"
            " model."
        ),
        reasons.NO_TRITON_TRAFFIC,
        Query(most(of("sidestep_triton_interval_mean_seconds"), "stage"), "{{stage}}"),
        unit="s",
    ),
)

BATCHING = (
    heat(
        "Batch sizes",
        "Batch sizes of executions. They are exact, because Triton counts each size.",
        reasons.NO_TRITON_TRAFFIC,
        BATCHES,
        "short",
    ),
    Panel(
        title="Executions by batch size",
        says="Executions per second, by batch size.",
        empty=reasons.NO_TRITON_TRAFFIC,
        kind="bargauge",
        unit="cps",
        queries=[
            Query(
                rate(of("sidestep_triton_batch_executions_total"), "batch_size"),
                "batch {{batch_size}}",
            )
        ],
    ),
    lines(
        "Time of an execution by batch size, mean",
        "Input, model and output of an execution; a batch pays as long as this grows more slowly than its size.",
        reasons.NO_TRITON_TRAFFIC,
        Query(
            ratio(
                rate(of("sidestep_triton_batch_seconds_total"), "batch_size"),
                rate(of("sidestep_triton_batch_executions_total"), "batch_size"),
            ),
            "batch {{batch_size}}",
        ),
        unit="s",
    ),
    lines(
        "Time of an execution by stage, mean",
        "Time of an execution in preparing inputs, in the model and in outputs, mean of all batch sizes.",
        reasons.NO_TRITON_TRAFFIC,
        Query(
            by_stage(
                rate(of("sidestep_triton_batch_stage_seconds_total"), "stage"),
                rate(of("sidestep_triton_batch_executions_total")),
            ),
            "{{stage}}",
        ),
        unit="s",
        stacked=True,
    ),
    lines(
        "Utilization",
        "Share of the time that a model's instances were executing. An execution counts when it ends, so a long one can make it more than 1.",
        reasons.BUSY,
        Query(
            ratio(
                rate(of("sidestep_triton_busy_seconds_total"), MODEL),
                total(of("sidestep_triton_instances"), MODEL),
            ),
            NAME,
        ),
        unit="percentunit",
    ),
    lines(
        "Time since the last execution",
        "Time since a model last executed.",
        reasons.NO_TRITON_TRAFFIC,
        Query(most(of("sidestep_triton_idle_seconds"), MODEL), NAME),
        unit="s",
    ),
    lines(
        "Memory",
        "Memory that backends reported for a model when they loaded it.",
        "No backend here reports its memory.",
        Query(total(of("sidestep_triton_memory_bytes"), (*MODEL, "type")), f"{NAME} {{{{type}}}}"),
        unit="bytes",
    ),
)

RESPONSES = (
    lines(
        "Responses",
        "Responses per second, by index within the request and outcome.",
        reasons.RESPONSES,
        Query(rate(of("sidestep_triton_responses_total"), "response"), "{{response}} response"),
        unit="cps",
        width=6,
    ),
    lines(
        "Time of responses, mean",
        (
            "Time of the first response from the start of computation, and of each other from the"
            " previous response: TTFT and ITL of a decoupled model."
        ),
        reasons.RESPONSES,
        Query(
            ratio(
                rate(of("sidestep_triton_response_seconds_total"), "response"),
                rate(of("sidestep_triton_responses_total"), "response"),
            ),
            "{{response}} response",
        ),
        unit="s",
        width=6,
    ),
    lines(
        "Time of responses by stage, mean",
        "Time of a response in the model and in outputs, by index within the request.",
        reasons.RESPONSES,
        Query(
            ratio(
                rate(of("sidestep_triton_response_stage_seconds_total"), ("response", "stage")),
                rate(of("sidestep_triton_response_stages_total"), ("response", "stage")),
            ),
            "{{response}} response {{stage}}",
        ),
        unit="s",
        width=6,
    ),
    lines(
        "Response cache",
        "Share of requests that the response cache answered.",
        reasons.CACHED,
        Query(
            ratio(
                rate(of("nv_cache_num_hits_per_model"), MODEL),
                f"({rate(of('nv_cache_num_hits_per_model'), MODEL)} + {rate(of('nv_cache_num_misses_per_model'), MODEL)})",
            ),
            NAME,
        ),
        unit="percentunit",
        most=1,
        width=6,
    ),
    lines(
        "Counter resets",
        "Counter resets of servers per second: a restart, a reload, another version.",
        reasons.TRITON,
        Query(rate(of("sidestep_triton_resets_total"), MODEL), NAME),
        unit="cps",
        width=6,
    ),
)

POLLED = (
    lines(
        "Polls",
        "Polls per second, by outcome.",
        reasons.TRITON,
        Query(rate(server("sidestep_triton_polls_total"), "outcome"), "{{outcome}}"),
        unit="cps",
        stacked=True,
    ),
    quantiles(
        "Poll duration",
        "From the request for statistics until they were received.",
        reasons.TRITON,
        POLLS,
    ),
    lines(
        "States",
        "Servers by state; a stale server is slow to respond.",
        reasons.TRITON,
        Query(total(server("sidestep_triton_state"), "state"), "{{state}}"),
        stacked=True,
        colors=SERVERS,
    ),
)

BOARD = Dashboard(
    file="triton",
    title="Triton",
    says="Triton servers: requests, time by stage, batches, responses, and polls.",
    tags=["triton"],
    variables=[
        *TARGET,
        Variable("model", "Model", server(SUCCESS)),
        Variable("version", "Version", Scope("model")(SUCCESS)),
    ],
    rows=[
        Row("Now", TILES),
        Row("Requests", REQUESTS),
        Row("Time", TIME),
        Row("Batches and models", BATCHING),
        Row("Responses and caches", RESPONSES, collapsed=True),
        Row("Polls", POLLED, collapsed=True),
    ],
    annotations=[
        Annotation(
            "Counter reset",
            grown(of("sidestep_triton_resets_total"), MODEL),
            NAME,
            "blue",
        )
    ],
)
