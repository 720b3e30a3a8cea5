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


def _counter(name: str, text: str, *labels: str) -> SelfRow:
    return SelfRow(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> SelfRow:
    return SelfRow(name, "gauge", text, labels)


def _subscription(name: str, kind: Kind, text: str) -> SelfRow:
    return SelfRow(f"sidestep_subscription_{name}", kind, text, ("subscription",))


# The table is laid out by hand: name above text, two lines a row.
# fmt: off
ROWS: tuple[SelfRow, ...] = (
    _gauge("sidestep_build_info", "Always 1; the label has the version.", "version"),
    _counter("sidestep_messages_total", "Messages received from senders, by kind.", "kind"),
    _counter("sidestep_items_total", "Items applied."),
    _counter("sidestep_rejected_total",
             "Messages and items rejected, by reason; bug is an error of the exporter, the others"
             " are of the sender.", "reason"),
    _gauge("sidestep_authorized_keys",
           "Authorized client keys; no sample if the socket does not require keys."),
    _gauge("sidestep_zap_up",
           "1 while ZAP checks the keys of connections, 0 once one could not be checked."),
    _counter("sidestep_rebinds_total",
             "Times the ingest socket was closed and bound again, by reason: memory, descriptors"
             " (too many open files), flood (messages that are refused kept others waiting), or"
             " stolen (another process took its path). Senders reconnect; no data is lost.",
             "reason"),
    _counter("sidestep_identity_conflicts_total",
             "Times that a process connected with the ids of another living process; its engines"
             " count apart."),
    _counter("sidestep_duplicates_total", "Items received more than once and applied once."),
    _counter("sidestep_lost_items_total",
             "Items lost: their sender no longer had them when the exporter asked again, or when"
             " it closed."),
    _counter("sidestep_rebucketed_observations_total",
             "Observations that a sender had folded into buckets with other bounds; each counts in"
             " the bucket that contains its old upper bound."),
    _gauge("sidestep_series", "Exposed series; a histogram counts as one."),
    _counter("sidestep_series_limited_total",
             "Updates counted under the label value __other__ (label_values) or rejected because a"
             " limit on series was reached, by limit.", "limit"),
    _gauge("sidestep_engine_up",
           "1 while a stream feeds the engine, 0 once all of its streams, or that of its core,"
           " have closed or have been silent for 30 s.", *PER_ENGINE),
    _gauge("sidestep_engine_info",
           "Always 1; dialect is the kind of engine, role is prefill, decode or both, and connectors"
           " transfer its KV.", *PER_ENGINE, "dialect", "role", "connectors"),
    _gauge("sidestep_engine_last_seen_timestamp_seconds",
           "Unix time of the engine's last item, from any of its processes.", *PER_ENGINE),
    _counter("sidestep_engine_restarts_total",
             "Times a stream of the engine resumed from a new process; counters continued.",
             *PER_ENGINE),
    _gauge("sidestep_engine_missing_fields",
           "1 for each field of the engine's statistics that its release should have and lacks, by"
           " the field's path; metrics that need it have no samples.", *PER_ENGINE, "field"),
    _gauge("sidestep_engine_state",
           "1 for the engine's present state, 0 for the other states: starting, ok, idle, slow,"
           " stalled, unreachable, stopped or asleep. See health.md.", *PER_ENGINE, "state"),
    _gauge("sidestep_engine_stalled_seconds",
           "Seconds for which a stalled engine has made no progress, by reason: step, no_steps,"
           " no_output, publisher, front_end or queue; no sample in other states.", *PER_ENGINE,
           "reason"),
    _gauge("sidestep_engine_step_age_seconds",
           "Seconds since the engine's oldest open step began, 0 without one; no sample for an"
           " engine whose processes report no steps.", *PER_ENGINE),
    _gauge("sidestep_engine_unfinished_requests",
           "Requests that the engine has accepted and not finished; no sample for an engine whose"
           " processes do not report them.", *PER_ENGINE),
    _gauge("sidestep_streams", "Connected streams: open, and received from within the last 30 s."),
    _gauge("sidestep_engines", "Registered engines."),
    _gauge("sidestep_stream_ring_bytes",
           "Bytes in the sender's ring: not sent, or not acknowledged.", "stream"),
    _gauge("sidestep_stream_lag_items",
           "Items that the sender had numbered at its last heartbeat and that are not applied yet.",
           "stream"),
    _gauge("sidestep_stream_durable_lag_items",
           "Applied items that no snapshot holds yet; the sender keeps them until one does.",
           "stream"),
    _counter("sidestep_folded_items_total",
             "Items that the sender folded because its ring was full: totals are complete, single"
             " items are not.", "stream"),
    _counter("sidestep_stream_push_dropped_total",
             "Items that the sender dropped: its queue was full, or the exporter rejected them.",
             "stream"),
    _counter("sidestep_stream_errors_total",
             "Records that the sender could not translate or encode.", "stream"),
    _subscription("connected", "gauge",
                  "1 while the subscription is connected to the publisher of an engine's stream."),
    _subscription("messages_total", "counter",
                  "Messages received from an engine's stream, replayed ones included."),
    _subscription("gaps_total", "counter", "Gaps in the sequence numbers of an engine's stream."),
    _subscription("replayed_messages_total", "counter",
                  "Messages of an engine's stream received by replay."),
    _subscription("lost_messages_total", "counter",
                  "Messages of an engine's stream that were missing and could not be replayed."),
    _subscription("duplicate_messages_total", "counter",
                  "Messages of an engine's stream that were ignored: received before, or too"
                  " late."),
    _subscription("restarts_total", "counter",
                  "Times that the publisher of an engine's stream restarted."),
    _gauge("sidestep_scrape_state",
           "1 for the present state of a scraped target: up, stale (its response is overdue, the"
           " last page is exposed) or down (nothing is exposed).", "target", "state"),
    _counter("sidestep_scrape_polls_total",
             "Polls of a scraped target, by outcome: ok, or the reason why there was no page.",
             "target", "outcome"),
    _gauge("sidestep_scrape_poll_duration_seconds",
           "Time that a scraped target took for its last response.", "target"),
    _gauge("sidestep_scrape_samples",
           "Samples on the last page of a scraped target, without unreadable lines.", "target"),
    _gauge("sidestep_scrape_left_out_samples",
           "Lines and samples of the last page of a scraped target that are not exposed, by"
           " reason.", "target", "reason"),
    _gauge("sidestep_engine_poll_state",
           "1 for the present state of a server of --engine: up, stale (a response is overdue) or"
           " down.", "target", "state"),
    _counter("sidestep_engine_polls_total",
             "Polls of a server of --engine, by outcome: ok, or the reason why there was no"
             " answer.", "target", "outcome"),
    _gauge("sidestep_engine_poll_duration_seconds",
           "Time that the last successful poll of a server of --engine took.", "target"),
    _counter("sidestep_otlp_requests_total",
             "Requests sent to OTLP receivers, by signal (metrics, traces or logs) and by their"
             " last status: that of HTTP, or timeout, connection or unsent; success or failure"
             " over gRPC.", "signal", "status"),
    _counter("sidestep_otlp_points_total",
             "Data points that the OTLP receiver accepted; a histogram is one."),
    _counter("sidestep_otlp_rejected_points_total",
             "Data points that the OTLP receiver rejected, alone or with their whole request, and"
             " that are not sent again. Not known over gRPC."),
    _gauge("sidestep_otlp_last_success_timestamp_seconds",
           "Unix time at which the OTLP receiver last accepted all requests of a push, 0 before;"
           " no sample without --otlp.endpoint."),
    _counter("sidestep_otlp_spans_total", "Spans that the OTLP receiver accepted."),
    _counter("sidestep_otlp_rejected_spans_total",
             "Spans that the OTLP receiver rejected, alone or with their whole request, and that"
             " are not sent again. Not known over gRPC."),
    _counter("sidestep_otlp_log_records_total", "Log records that the OTLP receiver accepted."),
    _counter("sidestep_otlp_rejected_log_records_total",
             "Log records that the OTLP receiver rejected, as with spans."),
    _counter("sidestep_request_records_total",
             "Records of ended requests made for --requests.log, --otlp.traces-endpoint and"
             " --otlp.logs-endpoint; one for all of them."),
    _counter("sidestep_request_records_lost_total",
             "Records that are lost, by reason and output (file, traces or logs): full (the output"
             " takes records too slowly, or not at all), removed or unreadable (in the snapshot of"
             " an exporter with other flags, or of another release); and requests without a"
             " record: unseen (their engine folded or dropped their events).", "reason", "output"),
    _gauge("sidestep_request_records_pending",
           "Records of requests that wait for an output: file, traces or logs.", "output"),
    _gauge("sidestep_gpu_hour_price",
           "Price of an hour of a GPU, in the currency of --prices; no sample without"
           " --prices.gpu-hour."),
    _gauge("sidestep_loop_lag_seconds",
           "Longest delay of a timer of the event loop in the last second."),
    _gauge("sidestep_snapshot_healthy",
           "1 while snapshots are written, 0 while they fail and counters would not survive a"
           " restart; no sample without --state.dir."),
    _gauge("sidestep_snapshot_duration_seconds", "Time to make the last snapshot."),
    _gauge("sidestep_snapshot_bytes", "Size of the last snapshot."),
    _gauge("sidestep_snapshot_timestamp_seconds", "Unix time of the last snapshot written."),
    _counter("sidestep_snapshot_errors_total", "Snapshots that could not be written."),
    _counter("sidestep_recovered_total",
             "Starts of this exporter, by recovered state: snapshot, none (there was none), or"
             " damaged (it could not be read, and was moved aside).", "from"),
    _counter("sidestep_auth_denied_total",
             "Denied clients and requests, by reason; curve is an engine's key, overload is a"
             " password that was not verified because too many others were waiting.", "reason"),
    _counter("sidestep_http_refused_total",
             "HTTP connections closed and requests answered with an error to limit resource usage,"
             " or for their host, by reason.", "reason"),
    _gauge("sidestep_http_connections", "Open HTTP connections."),
    _gauge("sidestep_web_config_current",
           "1 while the web configuration on disk is active, 0 while it is invalid and the last"
           " valid one stays active."),
    _gauge("sidestep_scrape_duration_seconds", "Time to render the last page."),
    _counter("sidestep_collector_errors_total",
             "Scrapes without the samples of a registered collector, because it failed."),
)
# fmt: on

BY_NAME = {row.name: row for row in ROWS}
