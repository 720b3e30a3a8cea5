"""The exporter's metrics about itself, exposed through prometheus_client."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sidestep import __version__
from sidestep.catalog.layout import exposed_names
from sidestep.errors import ConfigError
from sidestep.telemetry.rows import BY_NAME, SelfRow

Labels = tuple[str, ...]
LabelledValue = tuple[Labels, float]
Reading = Callable[[], Iterable[LabelledValue]]
"""Returns samples."""


class SelfMetrics(Collector):
    """Counters and gauges of ``rows``.

    Code adds to a counter where the event happens; a gauge is set, or read from its owner when a
    page is rendered. A thread may do so if no other one changes the same sample.
    """

    def __init__(self) -> None:
        self.created = time.time()
        self._values: dict[str, defaultdict[Labels, float]] = {
            name: defaultdict(float) for name in BY_NAME
        }
        self._readings: dict[str, Reading] = {}
        for name, row in BY_NAME.items():
            if row.kind == "counter" and not row.labels:
                self.add(name, 0)
        self.set("sidestep_build_info", 1, __version__)

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        """Add to a counter."""
        self._values[name][labels] += amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._values[name][labels] = value

    def read(self, name: str, reading: Reading) -> None:
        """Call ``reading`` for the samples of ``name`` on every page."""
        self._readings[BY_NAME[name].name] = reading

    def value(self, name: str, *labels: str) -> float:
        """Return the present value, 0 if there is none."""
        return self._values[name].get(labels, 0)

    def counters(self) -> Iterator[tuple[str, Labels, float]]:
        """Yield the counters that a snapshot holds."""
        for name, row in BY_NAME.items():
            if row.kind == "counter":
                yield from ((name, labels, n) for labels, n in [*self._values[name].items()] if n)

    def restore(self, counters: Iterable[tuple[str, Labels, float]], created: float) -> None:
        """Set counters from a snapshot; ignore those that this release does not have."""
        self.created = min(self.created, created or self.created)
        for name, labels, value in counters:
            row = BY_NAME.get(name)
            if row is not None and len(row.labels) == len(labels):
                self._values[name][labels] = value

    def samples(self, names: Collection[str] = ()) -> Iterator[tuple[SelfRow, list[LabelledValue]]]:
        """Yield the families that have samples, in the order of the page."""
        for name, row in BY_NAME.items():
            if names and name not in names:
                continue
            reading = self._readings.get(name)
            found = [*(self._values[name].items() if reading is None else reading())]
            if found:
                yield row, found

    def describe(self) -> Iterator[Metric]:
        """Yield the families without samples, whose names no other collector can have."""
        for row in BY_NAME.values():
            make = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            yield make(row.name, row.help)

    def collect(self) -> Iterable[Metric]:
        """Return nothing: pages have ``samples``."""
        return ()


class OwnRegistry(NamedTuple):
    """The exporter's metrics about itself, and a registry of all other collectors of this process."""

    metrics: SelfMetrics
    others: CollectorRegistry


def own_registry(metrics: SelfMetrics, others: Iterable[Collector]) -> OwnRegistry:
    """Return a registry of self-metrics, process, GC, platform, and ``others``.

    A user's collector that fails loses its own samples; the page still has the others.
    """
    registry = CollectorRegistry(auto_describe=True)
    registry.register(metrics)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    for other in others:
        try:
            registry.register(_Contained(other, metrics))
        except ValueError as error:
            raise ConfigError(f"collector {type(other).__name__}: {error}") from None
    return OwnRegistry(metrics, registry)


def names(registry: OwnRegistry) -> frozenset[str]:
    """Return all sample names of the families of ``registry``, also of families without samples."""
    found: set[str] = set()
    for family in (*registry.metrics.describe(), *registry.others.collect()):
        found |= {family.name, *(sample.name for sample in family.samples)}
        if family.type == "counter":
            found |= exposed_names(f"{family.name}_total", "counter")
        elif family.type in ("histogram", "summary"):
            found |= exposed_names(family.name, "histogram")
    return frozenset(found)


class _Contained(Collector):
    def __init__(self, collector: Collector, metrics: SelfMetrics) -> None:
        self.collector = collector
        self.metrics = metrics

    def collect(self) -> Iterable[Metric]:
        try:
            found = list(self.collector.collect())
            # A value that cannot be written would break the whole page.
            sum(float(sample.value) for metric in found for sample in metric.samples)
        except Exception:  # noqa: BLE001 - a user's collector may raise anything
            self.metrics.add("sidestep_collector_errors_total")
            return []
        return found


class LagMeter:
    """Longest delay of a regular timer of the event loop within the last second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent: list[tuple[float, float]] = []

    def note(self, lag: float) -> None:
        """Record that the timer ran ``lag`` seconds late."""
        now = self._clock()
        self._recent = [(at, known) for at, known in self._recent if now - at < 1.0]
        self._recent.append((now, max(lag, 0.0)))

    def reading(self) -> Iterable[LabelledValue]:
        """Return the only sample, as a reading for ``SelfMetrics.read``."""
        return [((), max((lag for _, lag in self._recent), default=0.0))]
