"""sidestep itself: is anything lost, is it in time, is it healthy."""

from __future__ import annotations

from tools.boards import reasons
from tools.boards.dashboard import TARGET, Dashboard, Row
from tools.boards.panels import Panel, Query
from tools.boards.queries import Scope, most, rate, total
from tools.boards.shapes import lines, tile

of = Scope("job", "instance")
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
        "Engines known, silent ones included.",
        reasons.EXPORTER,
        total(of("sidestep_engines")),
        width=4,
    ),
    tile("Streams", "Streams connected.", reasons.EXPORTER, total(of("sidestep_streams")), width=4),
    tile(
        "Series",
        "Series shown; a histogram is one.",
        reasons.EXPORTER,
        total(of("sidestep_series")),
        width=4,
    ),
    tile(
        "Not counted",
        "Items in a second that no page will ever show: lost, dropped by a sender, or refused.",
        reasons.EXPORTER,
        rate(of(LOST, DROPPED, "sidestep_rejected_total")),
        unit="cps",
        width=4,
        limits=(0.001, 1),
    ),
    tile(
        "Without a snapshot",
        "Exporters whose counts would not outlive them.",
        reasons.EXPORTER,
        f"{EXPORTERS_UP} - ({total(of('sidestep_snapshot_healthy'))} or 0 * {EXPORTERS_UP})",
        width=4,
        limits=(1, 100),
    ),
)

COUNTED = (
    lines(
        "Items",
        "Items applied in a second.",
        reasons.EXPORTER,
        Query(rate(of("sidestep_items_total"), "instance"), "{{instance}}"),
        unit="cps",
        width=6,
    ),
    lines(
        "Messages",
        "Received from senders in a second, by kind.",
        reasons.EXPORTER,
        Query(rate(of("sidestep_messages_total"), "kind"), "{{kind}}"),
        unit="cps",
        width=6,
    ),
    lines(
        "Lost, dropped, failed",
        (
            "Items in a second: that no sender holds any more, that a sender dropped because its queue was full, and"
            " records that it could not translate."
        ),
        reasons.EXPORTER,
        Query(rate(of(LOST)), "lost"),
        Query(rate(of(DROPPED)), "dropped"),
        Query(rate(of("sidestep_stream_errors_total")), "failed"),
        unit="cps",
        width=6,
    ),
    lines(
        "Refused",
        "Messages and items in a second by reason, and updates that were one series too many.",
        reasons.EXPORTER,
        Query(rate(of("sidestep_rejected_total"), "reason"), "{{reason}}"),
        Query(rate(of("sidestep_series_limited_total")), "too many series"),
        unit="cps",
        width=6,
    ),
)

DELIVERY = (
    lines(
        "Held by senders",
        "Bytes that are not sent or not acknowledged, by exporter.",
        reasons.STREAMS,
        Query(total(of("sidestep_stream_ring_bytes"), "instance"), "{{instance}}"),
        unit="bytes",
    ),
    lines(
        "Behind",
        "Items that senders had numbered and that are not applied, and those that no snapshot holds yet.",
        reasons.STREAMS,
        Query(total(of("sidestep_stream_lag_items"), "instance"), "not applied {{instance}}"),
        Query(
            total(of("sidestep_stream_durable_lag_items"), "instance"), "not durable {{instance}}"
        ),
    ),
    lines(
        "Again, and folded",
        "Items in a second that came twice and counted once, and those that a sender added up because its ring was full.",
        reasons.EXPORTER,
        Query(rate(of("sidestep_duplicates_total")), "came again"),
        Query(rate(of("sidestep_folded_items_total")), "folded"),
        unit="cps",
    ),
)

PROCESS = (
    lines(
        "Event loop",
        "Longest that the loop was late in the last second.",
        reasons.EXPORTER,
        Query(most(of("sidestep_loop_lag_seconds"), "instance"), "{{instance}}"),
        unit="s",
        width=6,
    ),
    lines(
        "Rendering",
        "Time to render the last page.",
        reasons.EXPORTER,
        Query(most(of("sidestep_scrape_duration_seconds"), "instance"), "{{instance}}"),
        unit="s",
        width=6,
    ),
    lines(
        "CPU",
        "Cores that the exporter uses.",
        reasons.EXPORTER,
        Query(rate(of("process_cpu_seconds_total"), "instance"), "{{instance}}"),
        width=6,
    ),
    lines(
        "Memory",
        "Resident memory of the exporter.",
        reasons.EXPORTER,
        Query(total(of("process_resident_memory_bytes"), "instance"), "{{instance}}"),
        unit="bytes",
        width=6,
    ),
    lines(
        "Snapshots",
        "Time to make the last snapshot.",
        reasons.STATE,
        Query(most(of("sidestep_snapshot_duration_seconds"), "instance"), "{{instance}}"),
        unit="s",
        width=6,
    ),
    lines(
        "Age of the snapshot",
        "Since the last one was written.",
        reasons.STATE,
        Query(
            f"time() - {most(of('sidestep_snapshot_timestamp_seconds'), 'instance')}",
            "{{instance}}",
        ),
        unit="s",
        width=6,
    ),
    lines(
        "Series",
        "Series shown by each exporter; a histogram is one.",
        reasons.EXPORTER,
        Query(total(of("sidestep_series"), "instance"), "{{instance}}"),
        width=6,
    ),
    lines(
        "Who was not let in",
        "Clients in a second, by reason: without a key or a password, or for what they would cost.",
        reasons.EXPORTER,
        Query(rate(of("sidestep_auth_denied_total"), "reason"), "{{reason}}"),
        Query(rate(of("sidestep_http_refused_total"), "reason"), "HTTP {{reason}}"),
        unit="cps",
        width=6,
    ),
)

SOURCES = (
    lines(
        "Subscriptions",
        "Publishers of engines' streams that there is a connection to, and those that there is none to.",
        reasons.SUBSCRIPTIONS,
        Query(total(f"{of('sidestep_subscription_connected')} == bool 1"), "connected"),
        Query(total(f"{of('sidestep_subscription_connected')} == bool 0"), "not connected"),
    ),
    lines(
        "Messages of streams",
        "In a second: taken, asked for again, and missing for good.",
        reasons.SUBSCRIPTIONS,
        Query(rate(of("sidestep_subscription_messages_total")), "taken"),
        Query(rate(of("sidestep_subscription_replayed_messages_total")), "asked for"),
        Query(rate(of("sidestep_subscription_lost_messages_total")), "lost"),
        unit="cps",
    ),
    lines(
        "Pages passed on",
        "Targets that are scraped and passed on, by state.",
        reasons.PASSED_ON,
        Query(total(of("sidestep_scrape_state"), "state"), "{{state}}"),
    ),
)

EXPORTERS = Panel(
    title="Exporters",
    says="Each exporter: what runs, what it holds, what it feeds on.",
    empty=reasons.EXPORTER,
    kind="table",
    width=24,
    queries=[
        Query(most(of("sidestep_build_info"), ("instance", "version"))),
        Query(total(of("sidestep_engines"), "instance")),
        Query(total(of("sidestep_streams"), "instance")),
        Query(total(of("sidestep_series"), "instance")),
        Query(rate(of("sidestep_items_total"), "instance")),
        Query(total(of("process_resident_memory_bytes"), "instance")),
    ],
    columns={
        "instance": "Exporter",
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
    title="sidestep's own health",
    says="Whether anything is lost, late or refused between the engines and Prometheus.",
    tags=["exporter"],
    variables=TARGET,
    rows=[
        Row("Now", (*TILES, EXPORTERS)),
        Row("What is counted", COUNTED),
        Row("Delivery", DELIVERY),
        Row("The process", PROCESS),
        Row("What it listens to", SOURCES),
    ],
)
