"""The peer: the catalogue's metrics as prometheus_client objects, updated as vLLM updates its own.

As in vLLM's PrometheusStatLogger, children are held rather than looked up, and each
value of a list is observed separately. Fields feed metrics by the layout of sidestep's own
updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sidestep.catalog.layout import Layout, SlotAssignment, StructFields
from sidestep.catalog.row import Handler, Row
from sidestep.engines.items import Item
from sidestep.engines.vllm.wire import VllmStep
from sidestep.metrics.engine import Engine
from sidestep.protocol.request_events import RequestEvents
from sidestep.tracking.requests.machine import RequestTracker
from sidestep.tracking.requests.outcomes import Outcomes

Fields = list[tuple[str, int]]
Pairs = tuple[Callable[[Any], tuple[Any, ...]], tuple[int, ...]]


class ClientMetrics:
    """A prometheus_client metric for each row; engines are its children."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.registry = CollectorRegistry()
        self.engines: dict[str, ClientEngine] = {}
        self.root = _Reads(layout.roots[VllmStep])
        self.outcomes = _Reads(layout.roots[Outcomes])
        self.lifecycles: dict[str, RequestTracker] = {}
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}

    def metric(self, row: Row, engine: Engine) -> Any:
        """Return the metric of ``row``; its first engine decides the bounds of a histogram."""
        found = self._metrics.get(row.name)
        if found is None:
            found = self._metrics[row.name] = new_metric(
                row.name,
                row.kind,
                row.help,
                row.labels,
                (row.bounds or engine.description.bounds[row.buckets])
                if row.kind == "histogram"
                else (),
                registry=self.registry,
            )
        return found

    def apply(self, engine: Engine, item: Item) -> None:
        """Add a step, or the outcomes of request events, to the children of ``engine``."""
        if isinstance(item, VllmStep):
            self.record(engine, item)
        elif isinstance(item, RequestEvents):
            outcomes = self.lifecycles.setdefault(engine.id, RequestTracker()).apply(item)
            children = self._children(engine)
            self.outcomes.run(children, outcomes)
            for tokens in outcomes.iteration_tokens:
                children.iteration_tokens.observe(tokens)

    def _children(self, engine: Engine) -> ClientEngine:
        children = self.engines.get(engine.id)
        if children is None:
            children = self.engines[engine.id] = ClientEngine(self, engine)
        return children

    def record(self, engine: Engine, step: Any) -> None:
        """Add ``step``, an item or anything with its attributes."""
        children = self._children(engine)
        self.root.run(children, step)
        if step.iteration is not None:
            children.iteration_tokens.observe(step.iteration.iteration_tokens)
        if step.scheduler is not None:
            children.device_hits.inc(step.scheduler.prefix_cache_stats.hits)


class ClientEngine:
    """The children of one engine by the layout's slots; a child exists once it has a value."""

    def __init__(self, metrics: ClientMetrics, engine: Engine) -> None:
        self._metrics = metrics
        self._engine = engine
        layout = metrics.layout
        self.scalars: list[Any] = [None] * layout.scalars
        self.histograms: list[Any] = [None] * len(layout.histograms)
        self._rows: dict[int, tuple[Row, tuple[str, ...]]] = {}
        for placed in layout.assignments:
            if placed.storage == "scalars":
                for slot, own in zip(placed.slots, placed.label_values, strict=True):
                    self._rows.setdefault(slot, (placed.row, own))
        hooks = layout.handled
        self.iteration_tokens = self.histogram(hooks["iteration_tokens"].slots[0])
        self.device_hits = self.scalar(hooks["cached_by_source"].slots[0])
        for placed in layout.assignments:
            if isinstance(placed.row.source, str | Handler) and not placed.row.feature:
                self._show(placed)

    def _show(self, placed: SlotAssignment) -> None:
        """Create the children that the engine starts at 0."""
        if placed.storage == "histogram":
            self.histogram(placed.slots[0])
        elif placed.storage == "scalars" and placed.row.kind == "counter":
            for slot in placed.slots[: len(placed.row.closed) or 1]:
                self.scalar(slot)

    def scalar(self, slot: int) -> Any:
        """Return the counter or gauge in ``slot``, created if necessary."""
        found = self.scalars[slot]
        if found is None:
            row, own = self._rows[slot]
            found = self.scalars[slot] = self._child(row, own)
        return found

    def histogram(self, slot: int) -> Any:
        """Return the histogram in ``slot``, created if necessary."""
        found = self.histograms[slot]
        if found is None:
            row = self._metrics.layout.histograms[slot]
            found = self.histograms[slot] = self._child(row, ())
        return found

    def _child(self, row: Row, own: tuple[str, ...]) -> Any:
        labels = {**self._engine.labels, **dict(zip(row.own_labels, own, strict=True))}
        values = [labels[name] for name in row.labels]
        return self._metrics.metric(row, self._engine).labels(*values)


class _Reads:
    """The fields of one struct in the layout, compiled to updates of children."""

    def __init__(self, section: StructFields) -> None:
        self.gauges = _pairs(section.gauges)
        self.counters = _pairs(section.counters)
        self.single = _pairs(section.observed)
        self.lists = _pairs(section.observed_lists)
        self.runs = section.observed_runs
        self.columns = section.observed_columns
        self.codes = section.code_fields
        self.tallies = [(n, p) for n, p in section.labelled_counts if p.storage == "scalars"]
        self.parts = [
            (name.removesuffix("[]"), name.endswith("[]"), _Reads(part))
            for name, part in section.nested.items()
        ]

    def run(self, engine: ClientEngine, source: Any) -> None:  # noqa: C901, PLR0912 - one pass
        """Set, add and observe what ``source`` holds."""
        scalars, histograms = engine.scalars, engine.histograms
        for slot, value in _read(self.gauges, source):
            (scalars[slot] or engine.scalar(slot)).set(value)
        for slot, value in _read(self.counters, source):
            (scalars[slot] or engine.scalar(slot)).inc(value)
        for slot, values in _read(self.lists, source):
            observe = (histograms[slot] or engine.histogram(slot)).observe
            for value in values:
                observe(value)
        for name, slot in self.runs:
            observe = (histograms[slot] or engine.histogram(slot)).observe
            for run in getattr(source, name):
                # prometheus_client has no way to observe a value several times at once.
                for _ in range(run.count):
                    observe(run.value)
        for slot, value in _read(self.single, source):
            (histograms[slot] or engine.histogram(slot)).observe(value)
        for name, placed in self.tallies:
            found = getattr(source, name)
            for slot, own in zip(placed.slots, placed.row.closed, strict=False):
                engine.scalar(slot).set(found.get(own, 0))
        for name, many, part in self.parts:
            below = getattr(source, name)
            if many:
                for each in below or ():
                    part.run_element(engine, each)
            elif below is not None:
                part.run(engine, below)

    def run_element(self, engine: ClientEngine, source: Any) -> None:
        """Observe one struct of a list."""
        for name, nested, slot in self.columns:
            value = getattr(source, name)
            histogram = engine.histograms[slot] or engine.histogram(slot)
            if nested:
                for each in value:
                    histogram.observe(each)
            elif value is not None:
                histogram.observe(value)
        for name, placed in self.codes:
            slot = placed.slots[getattr(source, name)]
            (engine.scalars[slot] or engine.scalar(slot)).inc()


def new_metric(
    name: str,
    kind: str,
    text: str,
    labels: Iterable[str],
    bounds: Iterable[float],
    *,
    registry: CollectorRegistry,
) -> Counter | Gauge | Histogram:
    """Create a metric of prometheus_client; ``name`` as exposed."""
    if kind == "histogram":
        return Histogram(name, text, list(labels), buckets=list(bounds), registry=registry)
    if kind == "counter":
        return Counter(name, text, list(labels), registry=registry)
    # The mode only matters in multiprocess mode; vLLM's loggers set it, too.
    return Gauge(name, text, list(labels), registry=registry, multiprocess_mode="mostrecent")


def _pairs(fields: Fields) -> Pairs | None:
    if not fields:
        return None
    names = [name for name, _ in fields]
    get = attrgetter(*names)
    read = get if len(names) > 1 else lambda source: (get(source),)
    return read, tuple(slot for _, slot in fields)


def _read(pairs: Pairs | None, source: Any) -> Iterable[tuple[int, Any]]:
    if pairs is None:
        return ()
    read, slots = pairs
    return zip(slots, read(source), strict=True)
