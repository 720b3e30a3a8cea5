"""The exporter's metrics about itself and its senders."""

from __future__ import annotations

import dataclasses

from sidestep.catalogue.model import Kind


@dataclasses.dataclass(frozen=True, slots=True)
class SelfRow:
    """One family; the exporter's code looks it up by ``name`` and cannot invent another."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


PER_ENGINE = ("engine", "model_name", "origin")
"""``origin`` is empty, which is as good as absent, but for engines of equal labels."""

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
        "sidestep_auth_denied_total",
        "counter",
        "Connections and requests refused, by reason.",
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
        "Times the ingest socket was closed and bound anew, by reason: its memory, or a path that"
        " somebody else had taken. Senders reconnect; nothing is lost.",
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
        "sidestep_label_values_limited_total",
        "counter",
        "Updates counted under the label value __other__ because a label had too many values.",
    ),
    SelfRow(
        "sidestep_engine_up",
        "gauge",
        "1 while a stream feeds the engine, 0 once all of them have said goodbye.",
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
    SelfRow("sidestep_streams", "gauge", "Streams connected."),
    SelfRow("sidestep_engines", "gauge", "Engines known."),
    SelfRow(
        "sidestep_stream_ring_bytes",
        "gauge",
        "Bytes the sender holds: not sent, or not acknowledged.",
        ("stream",),
    ),
    SelfRow(
        "sidestep_stream_push_dropped_total",
        "counter",
        "Items the sender dropped because its queue or ring was full.",
        ("stream",),
    ),
    SelfRow(
        "sidestep_stream_errors_total",
        "counter",
        "Records the sender could not translate or encode.",
        ("stream",),
    ),
    SelfRow(
        "sidestep_ingest_lag_seconds",
        "gauge",
        "Longest the event loop was late for its own timer in the last second.",
    ),
    SelfRow("sidestep_scrape_duration_seconds", "gauge", "Time to render the last page."),
    SelfRow(
        "sidestep_collector_errors_total",
        "counter",
        "Scrapes in which a registered collector failed and was left out.",
    ),
)

BY_NAME = {row.name: row for row in ROWS}
