"""The exporter's numbers about itself, kept plain and exposed through prometheus_client."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sidestep import __version__
from sidestep.catalog.layout import exposed_names
from sidestep.errors import ConfigError
from sidestep.telemetry.rows import BY_NAME, SelfRow

Labels = tuple[str, ...]
Sample = tuple[Labels, float]
Reading = Callable[[], Iterable[Sample | None]]
"""Tells samples; None where it has looked at many things and a turn of the event loop is due."""


class SelfMetrics(Collector):
    """Counters and gauges by the names of the catalogue's own table.

    A counter is added to where the thing happens; a gauge is set, or read from
    its owner when a page is made.
    """

    def __init__(self) -> None:
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
        """Ask ``reading`` for the samples of ``name`` at every page."""
        self._readings[BY_NAME[name].name] = reading

    def value(self, name: str, *labels: str) -> float:
        """The present value, 0 where nothing happened yet."""
        return self._values[name].get(labels, 0)

    def counters(self) -> Iterator[tuple[str, Labels, float]]:
        """What a snapshot holds of them."""
        for name, row in BY_NAME.items():
            if row.kind == "counter":
                yield from ((name, labels, n) for labels, n in self._values[name].items() if n)

    def restore(self, counters: Iterable[tuple[str, Labels, float]]) -> None:
        """Go on with counters of a snapshot; what this release does not have is left out."""
        for name, labels, value in counters:
            row = BY_NAME.get(name)
            if row is not None and len(row.labels) == len(labels):
                self._values[name][labels] = value

    def describe(self) -> Iterator[Metric]:
        """The families without samples: a page of some names is made from these."""
        for row in BY_NAME.values():
            yield _family(row)

    def samples(self, names: Collection[str] = ()) -> Iterator[tuple[SelfRow, list[Sample]] | None]:
        """The families that have samples, as they are now, in the order of the page.

        Args:
            names: Which ones; empty is all.

        Yields:
            A family, or None where a turn of the event loop is due.
        """
        for name, row in BY_NAME.items():
            if names and name not in names:
                continue
            reading = self._readings.get(name)
            found: list[Sample] = []
            for one in self._values[name].items() if reading is None else reading():
                if one is None:
                    yield None
                else:
                    found.append(one)
            if found:
                yield row, found

    def collect(self) -> Iterator[Metric]:
        """The families, for prometheus_client."""
        for found in self.samples():
            if found is not None:
                row, samples = found
                family = _family(row)
                for labels, value in samples:
                    family.add_metric(labels, value)
                yield family


def _family(row: SelfRow) -> CounterMetricFamily | GaugeMetricFamily:
    make = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    return make(row.name, row.help, labels=row.labels)


class OwnRegistry(CollectorRegistry):
    """What this process tells of itself.

    Attributes:
        metrics: The exporter's own numbers.
        others: All collectors but those: of the process, and users' own.
    """

    def __init__(self, metrics: SelfMetrics) -> None:
        super().__init__(auto_describe=True)
        self.metrics = metrics
        self.others = CollectorRegistry()
        super().register(metrics)

    def register(self, collector: Collector) -> None:
        """One more collector.

        Raises:
            ValueError: It has names that are taken.
        """
        super().register(collector)
        self.others.register(collector)


def own_registry(metrics: SelfMetrics, others: Iterable[Collector]) -> OwnRegistry:
    """A registry of this process's own: self-metrics, process, GC, platform, and ``others``.

    A collector of somebody else's that fails costs its own samples, not the page.

    Raises:
        ConfigError: One of ``others`` has names that are taken.
    """
    registry = OwnRegistry(metrics)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    for other in others:
        try:
            registry.register(_Contained(other, metrics))
        except ValueError as error:
            raise ConfigError(f"collector {type(other).__name__}: {error}") from None
    return registry


def names(registry: CollectorRegistry) -> frozenset[str]:
    """All that the families of ``registry`` take on a page, as ``plan.taken`` has them."""
    found: set[str] = set()
    for family in registry.collect():
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
            # A value that cannot be written would cost the whole page.
            sum(float(sample.value) for metric in found for sample in metric.samples)
        except Exception:  # noqa: BLE001 - whatever a stranger's collector raises
            self.metrics.add("sidestep_collector_errors_total")
            return []
        return found


class LagMeter:
    """How late the event loop was for a regular timer: the longest of the last second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent: list[tuple[float, float]] = []

    def note(self, lag: float) -> None:
        """The timer ran ``lag`` seconds late."""
        now = self._clock()
        self._recent = [(at, known) for at, known in self._recent if now - at < 1.0]
        self._recent.append((now, max(lag, 0.0)))

    @functools.cached_property
    def reading(self) -> Reading:
        """For ``SelfMetrics.read``."""
        return lambda: [((), max((lag for _, lag in self._recent), default=0.0))]
