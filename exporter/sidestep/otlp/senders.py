"""All that one exporter sends by OTLP, from its configuration and OpenTelemetry's variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from opentelemetry.sdk import environment_variables as variables

from sidestep.config.settings import Config
from sidestep.errors import ConfigError
from sidestep.exposition.pages import PageCopier
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.otlp.destination import LOGS, METRICS, TRACES, Destination, Signal
from sidestep.otlp.increments import Increments
from sidestep.otlp.metric_sender import MetricSender
from sidestep.otlp.page_families import PageFamilies
from sidestep.otlp.resource import Resource, resource
from sidestep.otlp.spans import log_records, spans
from sidestep.requests.record import RequestRecord
from sidestep.requests.record_output import RecordOutput, Write
from sidestep.snapshot.state_file import StateDirectory

Convert = Callable[[RequestRecord, bytes, Resource], Sequence[Any]]
"""Returns the SDK's objects for a record, which is also given as its line."""


def record_output(
    output: RecordOutput, convert: Convert, resource: Resource, destination: Destination
) -> Write:
    """Return what sends lines to a receiver; ``output`` counts those that cannot be read."""
    decode = msgspec.json.Decoder(RequestRecord).decode

    def converted(lines: Sequence[bytes]) -> Iterator[Sequence[Any]]:
        for line in lines:
            try:
                yield convert(decode(line), line, resource)
            except (msgspec.MsgspecError, ValueError):
                # A snapshot of another release may have it.
                continue

    def write(lines: list[bytes]) -> bool:
        made = [*converted(lines)]
        parts = [part for each in made for part in each]
        if parts and destination.export(parts, len(parts)) == "failed":
            return False
        for _ in range(len(lines) - len(made)):
            output.lose("unreadable")
        return True

    return write


TEMPORALITY = variables.OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE
DELTA: Mapping[str, Collection[str]] = {
    "delta": {"counter", "histogram"},
    "lowmemory": {"histogram"},
}
"""Kinds of families with delta temporality by preference; of any other, all are cumulative."""
AGGREGATION = variables.OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION
EXPONENTIAL = "base2_exponential_bucket_histogram"
MAX_PAUSE = 30.0
"""Most seconds before records are sent again."""
PERIOD = 1.0
"""Least seconds between two batches: records are collected in between."""


class Senders:
    """The senders of one exporter.

    Args:
        outputs: Outputs of records; those to OTLP are given what writes them.
        port: Port of the exporter's page; 0: none.
        directory: Keeps the totals that were sent with delta temporality.
    """

    def __init__(
        self,
        config: Config,
        copier: PageCopier,
        series_filter: SeriesFilter,
        outputs: Sequence[RecordOutput],
        *,
        port: int,
        directory: StateDirectory | None,
    ) -> None:
        metrics = copier.own.metrics
        source = resource(port)
        self.metrics: MetricSender | None = None
        if config.otlp_endpoint:
            preference = os.environ.get(TEMPORALITY, "").strip().lower()
            self.metrics = MetricSender(
                PageFamilies(copier, series_filter, exponential=_is_exponential(config)),
                Increments(DELTA.get(preference, ()), directory),
                source,
                Destination(METRICS, config.otlp_endpoint, metrics),
                metrics,
            )
        signals: Mapping[str, tuple[Signal, str, Convert]] = {
            "traces": (TRACES, config.otlp_traces_endpoint, spans),
            "logs": (LOGS, config.otlp_logs_endpoint, log_records),
        }
        self._destinations: list[Destination] = []
        for output in outputs:
            if output.name in signals:
                signal, url, convert = signals[output.name]
                destination = Destination(signal, url, metrics)
                self._destinations.append(destination)
                write = record_output(output, convert, source, destination)
                output.write_by(write, MAX_PAUSE, PERIOD)

    def close_records(self) -> None:
        """Close the connections of the outputs of records, which have been closed before."""
        for destination in self._destinations:
            destination.close()


def _is_exponential(config: Config) -> bool:
    """Return whether histograms are sent with their native buckets."""
    if os.environ.get(AGGREGATION) != EXPONENTIAL:
        return False
    if config.histograms == "classic":
        raise ConfigError(f"{AGGREGATION}={EXPONENTIAL}: requires --histograms native or both")
    return True
