"""Metrics of the exporter about itself and its senders, one row each.

``SelfMetrics`` counts, sets or reads them by name.
"""

from __future__ import annotations

import dataclasses

from sidestep.catalog.row import Kind


@dataclasses.dataclass(frozen=True, slots=True)
class SelfRow:
    """One family; ``SelfMetrics`` has the values of those in ``ROWS``."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


PER_ENGINE = ("engine", "model_name", "origin")
"""Labels of metrics by engine; ``origin`` is empty except for engines with equal labels."""


def _subscription(name: str, kind: Kind, text: str) -> SelfRow:
    return SelfRow(f"sidestep_subscription_{name}", kind, text, ("subscription",))


ROWS: tuple[SelfRow, ...] = (
    SelfRow("sidestep_build_info", "gauge", "Always 1; the label has the version.", ("version",)),
    SelfRow(
        "sidestep_messages_total",
        "counter",
        "Messages received from senders, by kind.",
        ("kind",),
    ),
    SelfRow("sidestep_items_total", "counter", "Items applied."),
    SelfRow(
        "sidestep_rejected_total",
        "counter",
        "Messages and items rejected, by reason; bug is an error of the exporter, the others are of the"
        " sender.",
        ("reason",),
    ),
    SelfRow(
        "sidestep_authorized_keys",
        "gauge",
        "Authorized client keys; no sample if the socket does not require keys.",
    ),
    SelfRow(
        "sidestep_zap_up",
        "gauge",
        "1 while ZAP checks the keys of connections, 0 once one could not be checked.",
    ),
    SelfRow(
        "sidestep_rebinds_total",
        "counter",
        "Times the ingest socket was closed and bound again, by reason: memory, descriptors"
        " (too many open files), flood (messages that are refused kept others waiting), or stolen"
        " (another process took its path). Senders reconnect; no data is lost.",
        ("reason",),
    ),
    SelfRow(
        "sidestep_identity_conflicts_total",
        "counter",
        "Times that a process connected with the ids of another living process; its engines count apart.",
    ),
    SelfRow(
        "sidestep_duplicates_total",
        "counter",
        "Items received more than once and applied once.",
    ),
    SelfRow(
        "sidestep_lost_items_total",
        "counter",
        "Items lost: their sender no longer had them when the exporter asked again, or when it closed.",
    ),
    SelfRow(
        "sidestep_rebucketed_observations_total",
        "counter",
        "Observations that a sender had folded into buckets with other bounds; each counts in the"
        " bucket that contains its old upper bound.",
    ),
    SelfRow("sidestep_series", "gauge", "Exposed series; a histogram counts as one."),
    SelfRow(
        "sidestep_series_limited_total",
        "counter",
        "Updates counted under the label value __other__ (label_values) or rejected because a limit on"
        " series was reached, by limit.",
        ("limit",),
    ),
    SelfRow(
        "sidestep_engine_up",
        "gauge",
        "1 while a stream feeds the engine, 0 once all of its streams, or that of its core, have closed"
        " or have been silent for 30 s.",
        PER_ENGINE,
    ),
    SelfRow(
        "sidestep_engine_last_seen_timestamp_seconds",
        "gauge",
        "Unix time of the engine's last item, from any of its processes.",
        PER_ENGINE,
    ),
    SelfRow(
        "sidestep_engine_restarts_total",
        "counter",
        "Times a stream of the engine resumed from a new process; counters continued.",
        PER_ENGINE,
    ),
    SelfRow(
        "sidestep_engine_missing_fields",
        "gauge",
        "1 for each field of the engine's statistics that its release should have and lacks, by the field's"
        " path; metrics that need it have no samples.",
        (*PER_ENGINE, "field"),
    ),
    SelfRow(
        "sidestep_engine_state",
        "gauge",
        "1 for the engine's present state, 0 for the other states: starting, ok, idle, slow, stalled,"
        " unreachable, stopped or asleep. See health.md.",
        (*PER_ENGINE, "state"),
    ),
    SelfRow(
        "sidestep_engine_stalled_seconds",
        "gauge",
        "Seconds for which a stalled engine has made no progress, by reason: step, no_steps, no_output,"
        " publisher, front_end or queue; no sample in other states.",
        (*PER_ENGINE, "reason"),
    ),
    SelfRow(
        "sidestep_engine_step_age_seconds",
        "gauge",
        "Seconds since the engine's oldest open step began, 0 without one; no sample for an engine"
        " whose processes report no steps.",
        PER_ENGINE,
    ),
    SelfRow(
        "sidestep_engine_unfinished_requests",
        "gauge",
        "Requests that the engine has accepted and not finished; no sample for an engine whose processes"
        " do not report them.",
        PER_ENGINE,
    ),
    SelfRow(
        "sidestep_streams",
        "gauge",
        "Connected streams: open, and received from within the last 30 s.",
    ),
    SelfRow("sidestep_engines", "gauge", "Registered engines."),
    SelfRow(
        "sidestep_stream_ring_bytes",
        "gauge",
        "Bytes in the sender's ring: not sent, or not acknowledged.",
        ("stream",),
    ),
    SelfRow(
        "sidestep_stream_lag_items",
        "gauge",
        "Items that the sender had numbered at its last heartbeat and that are not applied yet.",
        ("stream",),
    ),
    SelfRow(
        "sidestep_stream_durable_lag_items",
        "gauge",
        "Applied items that no snapshot holds yet; the sender keeps them until one does.",
        ("stream",),
    ),
    SelfRow(
        "sidestep_folded_items_total",
        "counter",
        "Items that the sender folded because its ring was full: totals are complete, single items are"
        " not.",
        ("stream",),
    ),
    SelfRow(
        "sidestep_stream_push_dropped_total",
        "counter",
        "Items that the sender dropped: its queue was full, or the exporter rejected them.",
        ("stream",),
    ),
    SelfRow(
        "sidestep_stream_errors_total",
        "counter",
        "Records that the sender could not translate or encode.",
        ("stream",),
    ),
    _subscription(
        "connected",
        "gauge",
        "1 while the subscription is connected to the publisher of an engine's stream.",
    ),
    _subscription(
        "messages_total",
        "counter",
        "Messages received from an engine's stream, replayed ones included.",
    ),
    _subscription("gaps_total", "counter", "Gaps in the sequence numbers of an engine's stream."),
    _subscription(
        "replayed_messages_total",
        "counter",
        "Messages of an engine's stream received by replay.",
    ),
    _subscription(
        "lost_messages_total",
        "counter",
        "Messages of an engine's stream that were missing and could not be replayed.",
    ),
    _subscription(
        "duplicate_messages_total",
        "counter",
        "Messages of an engine's stream that were ignored: received before, or too late.",
    ),
    _subscription(
        "restarts_total", "counter", "Times that the publisher of an engine's stream restarted."
    ),
    SelfRow(
        "sidestep_scrape_state",
        "gauge",
        "1 for the present state of a scraped target: up, stale (its response is overdue, the last page"
        " is exposed) or down (nothing is exposed).",
        ("target", "state"),
    ),
    SelfRow(
        "sidestep_scrape_polls_total",
        "counter",
        "Polls of a scraped target, by outcome: ok, or the reason why there was no page.",
        ("target", "outcome"),
    ),
    SelfRow(
        "sidestep_scrape_poll_duration_seconds",
        "gauge",
        "Time that a scraped target took for its last response.",
        ("target",),
    ),
    SelfRow(
        "sidestep_scrape_samples",
        "gauge",
        "Samples on the last page of a scraped target, without unreadable lines.",
        ("target",),
    ),
    SelfRow(
        "sidestep_scrape_left_out_samples",
        "gauge",
        "Lines and samples of the last page of a scraped target that are not exposed, by reason.",
        ("target", "reason"),
    ),
    SelfRow(
        "sidestep_engine_poll_state",
        "gauge",
        "1 for the present state of a server of --engine: up, stale (a response is overdue) or down.",
        ("target", "state"),
    ),
    SelfRow(
        "sidestep_engine_polls_total",
        "counter",
        "Polls of a server of --engine, by outcome: ok, or the reason why there was no answer.",
        ("target", "outcome"),
    ),
    SelfRow(
        "sidestep_engine_poll_duration_seconds",
        "gauge",
        "Time that the last successful poll of a server of --engine took.",
        ("target",),
    ),
    SelfRow(
        "sidestep_otlp_requests_total",
        "counter",
        "Requests sent to OTLP receivers, by signal (metrics, traces or logs) and by their last status: that of"
        " HTTP, or timeout, connection or unsent; success or failure over gRPC.",
        ("signal", "status"),
    ),
    SelfRow(
        "sidestep_otlp_points_total",
        "counter",
        "Data points that the OTLP receiver accepted; a histogram is one.",
    ),
    SelfRow(
        "sidestep_otlp_rejected_points_total",
        "counter",
        "Data points that the OTLP receiver rejected: as a part of a request, or a whole request with"
        " a status that no repetition changes. Over gRPC it is not known.",
    ),
    SelfRow(
        "sidestep_otlp_last_success_timestamp_seconds",
        "gauge",
        "Unix time at which the OTLP receiver last accepted all requests of a push, 0 before; no"
        " sample without --otlp.endpoint.",
    ),
    SelfRow(
        "sidestep_otlp_spans_total",
        "counter",
        "Spans that the OTLP receiver accepted.",
    ),
    SelfRow(
        "sidestep_otlp_rejected_spans_total",
        "counter",
        "Spans that the OTLP receiver rejected: as a part of a request, or a whole request with a status"
        " after which it is not repeated. Over gRPC it is not known.",
    ),
    SelfRow(
        "sidestep_otlp_log_records_total",
        "counter",
        "Log records that the OTLP receiver accepted.",
    ),
    SelfRow(
        "sidestep_otlp_rejected_log_records_total",
        "counter",
        "Log records that the OTLP receiver rejected, as with spans.",
    ),
    SelfRow(
        "sidestep_request_records_total",
        "counter",
        "Records of ended requests made for --requests.log, --otlp.traces-endpoint and"
        " --otlp.logs-endpoint; one for all of them.",
    ),
    SelfRow(
        "sidestep_request_records_lost_total",
        "counter",
        "Records that are lost, by reason and output (file, traces or logs): full (the output takes records"
        " too slowly, or not at all), removed or unreadable (in the snapshot of an exporter with other flags,"
        " or of another release); and requests without a record: unseen (their engine folded or dropped"
        " their events).",
        ("reason", "output"),
    ),
    SelfRow(
        "sidestep_request_records_pending",
        "gauge",
        "Records of requests that wait for an output: file, traces or logs.",
        ("output",),
    ),
    SelfRow(
        "sidestep_gpu_hour_price",
        "gauge",
        "Price of an hour of a GPU, in the currency of --prices; no sample without --prices.gpu-hour.",
    ),
    SelfRow(
        "sidestep_loop_lag_seconds",
        "gauge",
        "Longest delay of a timer of the event loop in the last second.",
    ),
    SelfRow(
        "sidestep_snapshot_healthy",
        "gauge",
        "1 while snapshots are written, 0 while they fail and counters would not survive a restart; no"
        " sample without --state.dir.",
    ),
    SelfRow("sidestep_snapshot_duration_seconds", "gauge", "Time to make the last snapshot."),
    SelfRow("sidestep_snapshot_bytes", "gauge", "Size of the last snapshot."),
    SelfRow(
        "sidestep_snapshot_timestamp_seconds", "gauge", "Unix time of the last snapshot written."
    ),
    SelfRow("sidestep_snapshot_errors_total", "counter", "Snapshots that could not be written."),
    SelfRow(
        "sidestep_recovered_total",
        "counter",
        "Starts of this exporter, by recovered state: snapshot, none (there was none), or damaged (it"
        " could not be read, and was moved aside).",
        ("from",),
    ),
    SelfRow(
        "sidestep_auth_denied_total",
        "counter",
        "Denied clients and requests, by reason; curve is an engine's key, overload is a password that"
        " was not verified because too many others were waiting.",
        ("reason",),
    ),
    SelfRow(
        "sidestep_http_refused_total",
        "counter",
        "HTTP connections closed and requests answered with an error to limit resource usage, or for"
        " their host, by reason.",
        ("reason",),
    ),
    SelfRow("sidestep_http_connections", "gauge", "Open HTTP connections."),
    SelfRow(
        "sidestep_web_config_current",
        "gauge",
        "1 while the web configuration on disk is active, 0 while it is invalid and the last valid one"
        " stays active.",
    ),
    SelfRow("sidestep_scrape_duration_seconds", "gauge", "Time to render the last page."),
    SelfRow(
        "sidestep_collector_errors_total",
        "counter",
        "Scrapes without the samples of a registered collector, because it failed.",
    ),
)

BY_NAME = {row.name: row for row in ROWS}
