"""The exporter's metrics about itself and its senders."""

from __future__ import annotations

import dataclasses

from sidestep.catalog.model import Kind


@dataclasses.dataclass(frozen=True, slots=True)
class SelfRow:
    """One family; the exporter's code looks it up by ``name`` and cannot invent another."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


PER_ENGINE = ("engine", "model_name", "origin")
"""``origin`` is empty, which is as good as absent, but for engines of equal labels."""


def _subscription(name: str, kind: Kind, text: str) -> SelfRow:
    return SelfRow(f"sidestep_subscription_{name}", kind, text, ("subscription",))


ROWS: tuple[SelfRow, ...] = (
    SelfRow("sidestep_build_info", "gauge", "1; the version is in the label.", ("version",)),
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
        "Messages and items refused, by reason; bug is ours, all others are the sender's.",
        ("reason",),
    ),
    SelfRow(
        "sidestep_authorized_keys",
        "gauge",
        "Keys that may connect; no sample where none is needed.",
    ),
    SelfRow(
        "sidestep_zap_up",
        "gauge",
        "1 while keys are checked as they should be, 0 from one that could not be.",
    ),
    SelfRow(
        "sidestep_rebinds_total",
        "counter",
        "Times the ingest socket was closed and bound anew, by reason: memory, descriptors"
        " (too many open files), or stolen (another process took its path). Senders reconnect; nothing"
        " is lost.",
        ("reason",),
    ),
    SelfRow(
        "sidestep_duplicates_total",
        "counter",
        "Items received again and not applied again.",
    ),
    SelfRow(
        "sidestep_lost_items_total",
        "counter",
        "Items that no sender holds any more: missing when asked for, or at its goodbye.",
    ),
    SelfRow(
        "sidestep_rebucketed_observations_total",
        "counter",
        "Observations that a sender folded into other buckets than the exporter's; each counts"
        " in the bucket of its old upper bound.",
    ),
    SelfRow("sidestep_series", "gauge", "Series shown; a histogram is one."),
    SelfRow(
        "sidestep_series_limited_total",
        "counter",
        "Updates counted under the label value __other__ (label_values) or refused because"
        " there were too many, by limit.",
        ("limit",),
    ),
    SelfRow(
        "sidestep_engine_up",
        "gauge",
        "1 while a stream feeds the engine, 0 once all of them have said goodbye or have been"
        " silent for 30 s.",
        PER_ENGINE,
    ),
    SelfRow(
        "sidestep_engine_last_seen_timestamp_seconds",
        "gauge",
        "Unix time of the engine's last item.",
        PER_ENGINE,
    ),
    SelfRow(
        "sidestep_engine_restarts_total",
        "counter",
        "Times a stream of the engine came back as a new process; its counters went on.",
        PER_ENGINE,
    ),
    SelfRow("sidestep_streams", "gauge", "Streams connected: open, and heard in the last 30 s."),
    SelfRow("sidestep_engines", "gauge", "Engines known."),
    SelfRow(
        "sidestep_stream_ring_bytes",
        "gauge",
        "Bytes the sender holds: not sent, or not acknowledged.",
        ("stream",),
    ),
    SelfRow(
        "sidestep_stream_lag_items",
        "gauge",
        "Items the sender had numbered at its last heartbeat and that are not applied.",
        ("stream",),
    ),
    SelfRow(
        "sidestep_stream_durable_lag_items",
        "gauge",
        "Items applied that no snapshot holds yet; the sender keeps them until one does.",
        ("stream",),
    ),
    SelfRow(
        "sidestep_folded_items_total",
        "counter",
        "Items the sender folded because its ring was full: all are counted, none by itself.",
        ("stream",),
    ),
    SelfRow(
        "sidestep_stream_push_dropped_total",
        "counter",
        "Items the sender dropped: its queue was full, or the exporter refused them.",
        ("stream",),
    ),
    SelfRow(
        "sidestep_stream_errors_total",
        "counter",
        "Records the sender could not translate or encode.",
        ("stream",),
    ),
    _subscription(
        "connected",
        "gauge",
        "1 while there is a connection to the publisher of an engine's stream.",
    ),
    _subscription(
        "messages_total",
        "counter",
        "Messages taken from an engine's stream, replayed ones included.",
    ),
    _subscription(
        "gaps_total", "counter", "Times that messages of an engine's stream were missing."
    ),
    _subscription(
        "replayed_messages_total",
        "counter",
        "Messages of an engine's stream that came when they were asked for.",
    ),
    _subscription(
        "lost_messages_total",
        "counter",
        "Messages of an engine's stream that were missing and that nobody had any more.",
    ),
    _subscription(
        "duplicate_messages_total",
        "counter",
        "Messages of an engine's stream that came again, or too late, and were left out.",
    ),
    _subscription(
        "restarts_total", "counter", "Times that the publisher of an engine's stream began anew."
    ),
    SelfRow(
        "sidestep_scrape_state",
        "gauge",
        "1 for the present state of a scraped target: up, stale (an answer is awaited for too long,"
        " the last page is shown) or down (nothing is shown).",
        ("target", "state"),
    ),
    SelfRow(
        "sidestep_scrape_polls_total",
        "counter",
        "Times a scraped target was asked, by what came of it: ok, or why there was no page.",
        ("target", "outcome"),
    ),
    SelfRow(
        "sidestep_scrape_poll_duration_seconds",
        "gauge",
        "Time that a scraped target took for its last answer.",
        ("target",),
    ),
    SelfRow(
        "sidestep_scrape_samples",
        "gauge",
        "Samples on the last page of a scraped target, without what could not be read.",
        ("target",),
    ),
    SelfRow(
        "sidestep_scrape_left_out_samples",
        "gauge",
        "Lines and samples of the last page of a scraped target that are not shown, by reason.",
        ("target", "reason"),
    ),
    SelfRow(
        "sidestep_forward_connected",
        "gauge",
        "1 while there is a connection to the exporter that everything is forwarded to; no sample"
        " without --forward.",
    ),
    SelfRow(
        "sidestep_forward_lag_seconds",
        "gauge",
        "Time for which something new has waited to be forwarded; no sample without --forward.",
    ),
    SelfRow("sidestep_forward_records_total", "counter", "Engines' records forwarded."),
    SelfRow("sidestep_forward_bytes_total", "counter", "Bytes forwarded."),
    SelfRow(
        "sidestep_forward_errors_total",
        "counter",
        "Records that were not forwarded or not taken, by reason; label is a --forward.label that"
        " an engine has already, and whose own value stands.",
        ("reason",),
    ),
    SelfRow(
        "sidestep_forward_sources",
        "gauge",
        "Exporters whose engines are forwarded to this one, and were heard in the last 30 s.",
    ),
    SelfRow(
        "sidestep_forward_conflicts_total",
        "counter",
        "Records that were refused because their source has begun a later epoch: two processes use"
        " one --forward.source.",
    ),
    SelfRow(
        "sidestep_loop_lag_seconds",
        "gauge",
        "Longest the event loop was late for its own timer in the last second.",
    ),
    SelfRow(
        "sidestep_snapshot_healthy",
        "gauge",
        "1 while what is shown outlives this process, 0 while it cannot be written; no sample"
        " without --state.dir.",
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
        "Starts of this exporter, by what they went on from: snapshot, none (there was none), or"
        " damaged (it could not be read, and was set aside).",
        ("from",),
    ),
    SelfRow(
        "sidestep_auth_denied_total",
        "counter",
        "Clients and requests that were not let in, by reason; curve is an engine's key, overload"
        " is a password that could not be verified because too many others waited.",
        ("reason",),
    ),
    SelfRow(
        "sidestep_http_refused_total",
        "counter",
        "Connections and requests of the HTTP side closed or answered with an error for what they"
        " would cost, by reason.",
        ("reason",),
    ),
    SelfRow("sidestep_http_connections", "gauge", "Connections to the HTTP side."),
    SelfRow(
        "sidestep_web_config_current",
        "gauge",
        "1 while the web configuration on disk is the one in force, 0 while it is wrong and the"
        " last good one stays.",
    ),
    SelfRow("sidestep_scrape_duration_seconds", "gauge", "Time to render the last page."),
    SelfRow(
        "sidestep_collector_errors_total",
        "counter",
        "Scrapes in which a registered collector failed and was left out.",
    ),
)

BY_NAME = {row.name: row for row in ROWS}
