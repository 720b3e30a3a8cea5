"""The senders of an exporter, from its configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from sidestep.config.settings import Config
from sidestep.exposition.pages import Hold
from sidestep.otlp.envelope import Envelope
from sidestep.otlp.log_records import log_record
from sidestep.otlp.page_families import PageFamilies
from sidestep.otlp.receiver import LOGS, METRICS, TRACES, Receiver, Signal
from sidestep.otlp.record_sender import Encode, RecordSender
from sidestep.otlp.resource import resource
from sidestep.otlp.sender import Durable, OtlpSender
from sidestep.otlp.senders import Senders
from sidestep.otlp.spans import spans
from sidestep.requests.record_queue import RecordQueue
from sidestep.telemetry.self_metrics import SelfMetrics

ENCODERS: Mapping[str, tuple[Signal, Encode]] = {
    "traces": (TRACES, spans),
    "logs": (LOGS, log_record),
}
"""Signal and encoder of records, by the output of their queue."""


def senders(
    config: Config,
    port: int,
    families: PageFamilies,
    queues: Sequence[RecordQueue],
    metrics: SelfMetrics,
    *,
    hold: Hold,
    snapshots: Durable | None,
) -> Senders:
    """Return the senders.

    Args:
        config: All settings.
        port: Port of the exporter's page; 0: none.
        families: Families of the page.
        queues: Records by output; those of other outputs than OTLP's are ignored.
        metrics: Self-metrics.
        hold: Pauses all changes for a block, so that a push is of one moment.
        snapshots: Snapshots that pushes wait for.
    """
    envelope = Envelope(resource(os.environ, port, dict(config.otlp_resource)))
    headers = {header.name: header.text for header in config.otlp_header}
    urls = {"traces": config.otlp_traces_endpoint, "logs": config.otlp_logs_endpoint}

    def receiver(signal: Signal, url: str) -> Receiver:
        return Receiver(signal, url, headers, metrics)

    pushes = None
    if config.otlp_endpoint:
        to = receiver(METRICS, config.otlp_endpoint)
        pushes = OtlpSender(families, envelope, to, metrics, hold=hold, snapshots=snapshots)
    records = []
    for queue in queues:
        if queue.output in ENCODERS:
            signal, encode = ENCODERS[queue.output]
            to = receiver(signal, urls[queue.output])
            records.append(RecordSender(queue, encode, envelope, to))
    return Senders(pushes, records)
