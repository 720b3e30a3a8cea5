"""The health dashboard: losses, delays and resources of sidestep itself."""

from __future__ import annotations

from tools.boards import reasons
from tools.boards.colors import SERVERS
from tools.boards.dashboard import TARGET, Annotation, Dashboard, Row
from tools.boards.engine_health import ENGINES
from tools.boards.panels import Panel, Query
from tools.boards.queries import (
    PLACE,
    PLACE_COLUMNS,
    PLACE_NAME,
    Scope,
    changed,
    most,
    rate,
    total,
)
from tools.boards.shapes import lines, tile

of = Scope()
LOST = "sidestep_lost_items_total"
EXPORTERS_UP = total(of("sidestep_build_info"))
DROPPED = "sidestep_stream_push_dropped_total"

TILES = (
    tile(
        "Exporters up",
        "Targets that Prometheus scrapes.",
        "Prometheus has no such target.",
        total(of("up")),
        width=4,
    ),
    tile(
        "Engines",
        ENGINES,
        reasons.EXPORTER,
        total(of("sidestep_engines")),
        width=4,
    ),
    tile("Streams", "Streams connected.", reasons.EXPORTER, total(of("sidestep_streams")), width=4),
    tile(
        "Series",
        "Series exposed; a histogram is one.",
        reasons.EXPORTER,
        total(of("sidestep_series")),
        width=4,
    ),
    tile(
        "Items not counted",
        "Items per second that will never be counted: lost, dropped by a sender, or refused.",
        reasons.EXPORTER,
        rate(of(LOST, DROPPED, "sidestep_rejected_total")),
        unit="cps",
        width=4,
        limits=(0.001, 1),
    ),
    tile(
        "Exporters without snapshots",
        "Exporters whose counts would be lost at a restart: no --state.dir, or writing fails.",
        reasons.EXPORTER,
        f"{EXPORTERS_UP} - ({total(of('sidestep_snapshot_healthy'))} or 0 * {EXPORTERS_UP})",
        width=4,
        limits=(1, 100),
    ),
)

COUNTED = (
    lines(
        "Items",
        "Items applied per second.",
        reasons.EXPORTER,
        Query(rate(of("sidestep_items_total"), PLACE), PLACE_NAME),
        unit="cps",
        width=6,
    ),
    lines(
        "Messages",
        "Messages from senders per second, by kind.",
        reasons.EXPORTER,
        Query(rate(of("sidestep_messages_total"), "kind"), "{{kind}}"),
        unit="cps",
        width=6,
    ),
    lines(
        "Lost, dropped and failed items",
        (
            "Items per second that no sender holds any more, that a sender dropped because "
            "its queue was full, and that a sender could not translate."
        ),
        reasons.EXPORTER,
        Query(rate(of(LOST)), "lost"),
        Query(rate(of(DROPPED)), "dropped"),
        Query(rate(of("sidestep_stream_errors_total")), "failed"),
        unit="cps",
        width=6,
    ),
    lines(
        "Rejected messages and items",
        "Messages and items per second, by reason, and updates over the limit on series.",
        reasons.EXPORTER,
        Query(rate(of("sidestep_rejected_total"), "reason"), "{{reason}}"),
        Query(rate(of("sidestep_series_limited_total")), "too many series"),
        unit="cps",
        width=6,
    ),
)

DELIVERY = (
    lines(
        "Sender buffers",
        "Bytes that senders hold because they are not sent or not acknowledged, by exporter.",
        reasons.STREAMS,
        Query(total(of("sidestep_stream_ring_bytes"), PLACE), PLACE_NAME),
        unit="bytes",
    ),
    lines(
        "Items not yet applied or saved",
        (
            "Items that senders have sent and the exporter has not applied, and applied items "
            "that are in no snapshot yet."
        ),
        reasons.STREAMS,
        Query(total(of("sidestep_stream_lag_items"), PLACE), f"not applied {PLACE_NAME}"),
        Query(total(of("sidestep_stream_durable_lag_items"), PLACE), f"not durable {PLACE_NAME}"),
    ),
    lines(
        "Duplicates and folded items",
        (
            "Items per second that were received twice (and counted once), and that a sender "
            "folded because its ring was full."
        ),
        reasons.EXPORTER,
        Query(rate(of("sidestep_duplicates_total")), "received twice"),
        Query(rate(of("sidestep_folded_items_total")), "folded"),
        unit="cps",
    ),
)

PROCESS = (
    lines(
        "Event loop delay",
        "Longest delay of the event loop in the last second.",
        reasons.EXPORTER,
        Query(most(of("sidestep_loop_lag_seconds"), PLACE), PLACE_NAME),
        unit="s",
        width=6,
    ),
    lines(
        "Render duration",
        "Time to render the last page.",
        reasons.EXPORTER,
        Query(most(of("sidestep_scrape_duration_seconds"), PLACE), PLACE_NAME),
        unit="s",
        width=6,
    ),
    lines(
        "CPU",
        "Cores that the exporter uses.",
        reasons.EXPORTER,
        Query(rate(of("process_cpu_seconds_total"), PLACE), PLACE_NAME),
        width=6,
    ),
    lines(
        "Memory",
        "Resident memory of the exporter.",
        reasons.EXPORTER,
        Query(total(of("process_resident_memory_bytes"), PLACE), PLACE_NAME),
        unit="bytes",
        width=6,
    ),
    lines(
        "Snapshot duration",
        "Time to make the last snapshot.",
        reasons.STATE,
        Query(most(of("sidestep_snapshot_duration_seconds"), PLACE), PLACE_NAME),
        unit="s",
        width=6,
    ),
    lines(
        "Snapshot age",
        "Time since the last snapshot was written.",
        reasons.STATE,
        Query(
            f"time() - {most(of('sidestep_snapshot_timestamp_seconds'), PLACE)}",
            PLACE_NAME,
        ),
        unit="s",
        width=6,
    ),
    lines(
        "Series",
        "Series that each exporter exposes; a histogram is one.",
        reasons.EXPORTER,
        Query(total(of("sidestep_series"), PLACE), PLACE_NAME),
        width=6,
    ),
    lines(
        "Rejected clients",
        "Rejected clients per second, by reason: no key or password, or a limit.",
        reasons.EXPORTER,
        Query(rate(of("sidestep_auth_denied_total"), "reason"), "authentication {{reason}}"),
        Query(rate(of("sidestep_http_refused_total"), "reason"), "HTTP {{reason}}"),
        unit="cps",
        width=6,
    ),
)

SOURCES = (
    lines(
        "Subscriptions",
        "Publishers of engines' streams that are connected, and those that are not.",
        reasons.SUBSCRIPTIONS,
        Query(total(f"{of('sidestep_subscription_connected')} == bool 1"), "connected"),
        Query(total(f"{of('sidestep_subscription_connected')} == bool 0"), "not connected"),
    ),
    lines(
        "Messages of streams",
        "Messages per second that were applied, requested again, or lost.",
        reasons.SUBSCRIPTIONS,
        Query(rate(of("sidestep_subscription_messages_total")), "applied"),
        Query(rate(of("sidestep_subscription_replayed_messages_total")), "requested again"),
        Query(rate(of("sidestep_subscription_lost_messages_total")), "lost"),
        unit="cps",
    ),
    lines(
        "Scraped targets",
        "Targets whose pages the exporter scrapes and exposes, by state.",
        reasons.PASSED_ON,
        Query(total(of("sidestep_scrape_state"), "state"), "{{state}}"),
        colors=SERVERS,
    ),
)

EXPORTERS = Panel(
    title="Exporters",
    says="Version, series, memory and sources of each exporter.",
    empty=reasons.EXPORTER,
    kind="table",
    width=24,
    queries=[
        Query(most(of("sidestep_build_info"), (*PLACE, "version"))),
        Query(total(of("sidestep_engines"), PLACE)),
        Query(total(of("sidestep_streams"), PLACE)),
        Query(total(of("sidestep_series"), PLACE)),
        Query(rate(of("sidestep_items_total"), PLACE)),
        Query(total(of("process_resident_memory_bytes"), PLACE)),
    ],
    columns={
        **PLACE_COLUMNS,
        "version": "Version",
        "Value #B": "Engines",
        "Value #C": "Streams",
        "Value #D": "Series",
        "Value #E": "Items/s",
        "Value #F": "Memory",
    },
    units={"Memory": "bytes", "Items/s": "cps"},
)

BOARD = Dashboard(
    file="sidestep",
    title="Exporter health",
    says="Losses, delays and rejections between the engines and Prometheus.",
    tags=["exporter"],
    variables=TARGET,
    rows=[
        Row("Now", (*TILES, EXPORTERS)),
        Row("Items and messages", COUNTED),
        Row("Delivery", DELIVERY),
        Row("The process", PROCESS),
        Row("Subscriptions and targets", SOURCES, collapsed=True),
    ],
    annotations=[
        Annotation(
            "Exporter restarted",
            changed(of("process_start_time_seconds"), PLACE),
            PLACE_NAME,
            "blue",
        )
    ],
)
