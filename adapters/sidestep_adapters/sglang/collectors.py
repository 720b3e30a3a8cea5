"""What SGLang's metric collectors tell, as items; needs no SGLang itself.

Each collector of a process (of a scheduler, a tokenizer, a radix cache, a storage) is
an engine of the exporter's, by the labels that the collector puts on all it counts.
Processes whose collectors have the same labels feed the same engine, as they feed the
same series of SGLang's own page.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from sidestep.catalog.buckets import DEFAULTS
from sidestep.catalog.model import Row, Sampled
from sidestep.engines.items import Item, SglangStats
from sidestep.engines.sglang.dialect import DIALECT
from sidestep.engines.sglang.rows import DEAD, QUEUES
from sidestep.engines.sglang.wire import SchedulerStats
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.environment import identity
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.publisher.translate import printable, to_wire
from sidestep_adapters.sglang.deferred_metrics import Notes, Source
from sidestep_adapters.sglang.metric_stubs import Meter

ROWS: Mapping[str, Row] = {row.name: row for row in DIALECT.rows_for()}
RENAMED = {"num_prefill_prealloc_queue_reqs": "num_prefill_bootstrap_queue_reqs"}
"""Fields of the stats that older releases call otherwise."""
SILENT_FAMILIES = frozenset({*(name for name, _ in DEAD), *(f"sglang:{name}" for name in RENAMED)})
FEATURES = {
    "enable_lora": "lora",
    "enable_hierarchical_cache": "hicache",
    "enable_streaming_session": "streaming_session",
}
"""Attributes of a scheduler's collector, and what the catalogue calls them."""
IDLE = {
    "decode_sum_seq_lens": 0,
    "gen_throughput": 0.0,
    "num_retracted_reqs": 0,
    "num_paused_reqs": 0,
}
"""What is so where nothing runs or waits; SGLang goes on showing what its last report said."""


class StatsSource(Source):
    """The scheduler's stats: SGLang changes one object and hands it out again and again.

    Args:
        engine: Index of the scheduler's engine.

    Attributes:
        noted: Notes a report's fields; or how many requests run and wait after an
            iteration, by which no report was made.
    """

    def __init__(self, notes: Notes, engine: int) -> None:
        self._notes = notes
        self.noted = notes.of(self)
        self._engine = engine
        self._fields: dict[str, Any] = {}

    def note(self, stats: Any) -> None:
        """A report, on the scheduler's loop: its fields as they are now.

        Lists and queues' counts are referenced: SGLang makes them anew for each report.
        """
        self.noted((), stats.__dict__.copy(), 1)

    def take(self, key: Any, value: Any, weight: int) -> None:  # noqa: ARG002 - as Source
        """See ``Source``: the newest word on each field stands."""
        if isinstance(value, dict):
            self._fields.update(value)
            for name, now in RENAMED.items():
                if name in value:
                    self._fields[now] = self._fields.pop(name)
            for name in QUEUES:
                # Older releases count requests in all, and say so by a number.
                if isinstance(self._fields.get(name), int):
                    self._fields[name] = _queue(self._fields[name])
            return
        if not self._fields:
            # Nothing is known of the rest before the first report.
            return
        running, waiting = value
        self._fields["num_running_reqs"] = _queue(running)
        self._fields["num_queue_reqs"] = _queue(waiting)

    def items(self, now: float) -> list[Item]:
        """See ``Source``."""
        if not self._fields:
            return []
        fields = {name: _known(value) for name, value in self._fields.items()}
        if not (_total(fields, "num_running_reqs") or _total(fields, "num_queue_reqs")):
            fields.update((name, zero) for name, zero in IDLE.items() if name in fields)
        if not fields.get("hicache_host_mamba_total_states"):
            fields["hicache_host_mamba_total_states"] = None
            fields["hicache_host_mamba_used_states"] = None
        stats, lost = to_wire(SimpleNamespace(**fields), SchedulerStats)
        for _ in range(lost):
            self._notes.fail("a value of the scheduler's stats was left out")
        return [SglangStats(self._engine, now, time.time(), stats)]

    def again(self, now: float) -> list[Item]:
        """The gauges as they were last."""
        return self.items(now)


def _queue(total: int) -> Any:
    return SimpleNamespace(total=total, by_priority=None)


def _known(value: Any) -> Any:
    """None for a number that is none: SGLang's sign for what was never measured."""
    return None if isinstance(value, float) and value != value else value  # noqa: PLR0124 - NaN


def _total(fields: Mapping[str, Any], name: str) -> int:
    return int(getattr(fields.get(name), "total", 0) or 0)


class Process:
    """One process of an engine: its notes, its collectors' engines, its one publisher.

    Args:
        beside: Whether the collectors' own objects go on counting.
    """

    def __init__(self, endpoint: str, namespace: str, *, beside: bool) -> None:
        self.beside = beside
        self.notes = Notes()
        self.publisher: Publisher | None = None
        self._endpoint = endpoint
        self._namespace = namespace
        self._model = ""
        self._lock = threading.Lock()
        self._infos: list[EngineInfo] = []
        self._sources: list[Meter | StatsSource] = []
        self._readers: list[Reader] = []
        self.wrapped: set[str] = set()
        """Families of collectors: what is in their place tells of them."""

    def start(self, name: str, model: str = "") -> None:
        """Begin to publish, as the process ``name`` of this deployment, unless it has begun.

        ``model``: of a process that has no collectors which say it.
        """
        self._model = self._model or model
        if self.publisher is None:
            self.publisher = Publisher(
                self._endpoint,
                identity(self._namespace, self._model, name),
                self._infos,
                extra=self._extra,
                again=self._again,
                notes=self.notes,
            )
            self.notes.fail = self.publisher.fail

    def stats(self, collector: Any, role: str) -> StatsSource:
        """Where a scheduler's ``collector`` notes its stats."""
        source = StatsSource(self.notes, self.engine(role, collector.labels, _features(collector)))
        self._sources.append(source)
        return source

    def engine(
        self,
        role: str,
        labels: Mapping[str, Any],
        features: list[str] | None = None,
        bounds: Mapping[str, list[float]] | None = None,
    ) -> int:
        """The index of the engine that has these labels; those that are empty are its children's."""
        shown = _shown(labels)
        model = shown.get("model_name", "")
        self._model = self._model or model
        others = sorted((name, value) for name, value in shown.items() if name != "model_name")
        said = ",".join(f"{name}={value}" for name, value in others)
        name = identity(self._namespace, model, f"sglang/{role}/{said}" if shown else "sglang")
        # The engine's threads and the publisher's come here.
        with self._lock:
            index = next((i for i, known in enumerate(self._infos) if known.id == name), None)
            if index is None:
                index = len(self._infos)
                self._infos.append(EngineInfo(name, "sglang", shown))
            info = self._infos[index]
            info.features = sorted({*info.features, *(features or ())})
            info.bounds = {**info.bounds, **(bounds or {})}
            if self.publisher is not None:
                self.publisher.describe(self._infos)
        return index

    def meter(self, engine: int, metric: Any, labels: Mapping[str, Any]) -> Meter:
        """A meter in place of ``metric``, one of prometheus_client's."""
        name = family_name(metric)
        row = ROWS.get(name)
        # Empty labels are for requests to fill in; a scheduler's priority is its queues' alone.
        taken = _shown(labels) if row is None or row.extra_labels else labels
        meter = Meter(
            self.notes,
            name,
            metric._type,
            engine=engine,
            labelnames=metric._labelnames,
            own=sorted(set(metric._labelnames) - taken.keys()),
            text="" if row is not None else printable(metric._documentation),
            bounds=bounds_of(metric),
            described=row is None,
            native=metric,
            given=labels,
            beside=self.beside,
        )
        self._sources.append(meter)
        return meter

    def read(self, reader: Reader) -> None:
        """Ask ``reader`` about once a second, in the publisher's thread."""
        self._readers.append(reader)

    def _extra(self) -> Iterator[Item]:
        for reader in self._readers:
            reader()
        return iter(())

    def _again(self) -> list[Item]:
        now = time.monotonic()
        return [item for source in self._sources for item in source.again(now)]


class Reader:
    """Notes what nobody told."""

    def __call__(self) -> None:
        """Look, and note."""
        raise NotImplementedError


def wrap(process: Process, collector: Any, role: str) -> dict[str, Meter]:
    """Put meters in the place of ``collector``'s metrics, and say by attribute which.

    Left alone is what ``log_stats`` sets: its stats travel whole.
    """
    labels = getattr(collector, "labels", None) or {}
    found = {name: m for name, m in vars(collector).items() if _is_told_singly(m)}
    engine = process.engine(role, labels, _features(collector), told_bounds(found.values()))
    made: dict[str, Meter] = {}
    families: dict[str, Meter] = {}
    for name, metric in found.items():
        made[name] = families[family_name(metric)] = process.meter(engine, metric, labels)
        process.wrapped.add(family_name(metric))
        setattr(collector, name, made[name])
        _show(metric, made[name])
    for name, value in list(vars(collector).items()):
        # Children that were asked for when the collector was made.
        if isinstance(value, dict) and any(map(_is_child, value.values())):
            setattr(collector, name, {key: _bound(v, families) for key, v in value.items()})
        elif _is_child(value):
            setattr(collector, name, _bound(value, families))
    return made


def family_name(metric: Any) -> str:
    """The name of its samples: prometheus_client keeps a counter's without the suffix."""
    return f"{metric._name}_total" if metric._type == "counter" else str(metric._name)


def bounds_of(metric: Any) -> list[float]:
    """A histogram's bounds, without +Inf."""
    return [float(bound) for bound in getattr(metric, "_upper_bounds", ())][:-1]


def is_metric(value: Any) -> bool:
    """Whether ``value`` is a metric of prometheus_client's, which need not be here."""
    return (
        getattr(value, "_type", "") in ("counter", "gauge", "histogram", "summary")
        and hasattr(value, "_labelnames")
        and not isinstance(value, Meter)
    )


def _is_child(value: Any) -> bool:
    return is_metric(value) and bool(getattr(value, "_labelvalues", ()))


def _is_told_singly(value: Any) -> bool:
    if not is_metric(value) or _is_child(value):
        return False
    name = family_name(value)
    row = ROWS.get(name)
    if row is None:
        return name not in SILENT_FAMILIES
    # Of a name that was a gauge's in another release this one's cannot be shown.
    return isinstance(row.source, Sampled) and row.kind == value._type


def _bound(child: Any, families: Mapping[str, Meter]) -> Any:
    """A child of the meter that stands in the place of ``child``'s family."""
    meter = families.get(family_name(child)) if _is_child(child) else None
    return child if meter is None else meter.labels(*child._labelvalues)


def _show(metric: Any, meter: Meter) -> None:
    """Note that children exist which have counted nothing yet: the engine shows them at 0."""
    if meter.kind == "gauge":
        return
    if not metric._labelnames:
        meter.note({}, 0, 0)
    for values in list(getattr(metric, "_metrics", ())):
        meter.note(dict(zip(metric._labelnames, values, strict=True)), 0, 0)


def told_bounds(metrics: Iterable[Any]) -> dict[str, list[float]]:
    """Bucket families whose bounds the engine was told otherwise."""
    found: dict[str, list[float]] = {}
    for metric in metrics:
        row = ROWS.get(family_name(metric))
        bounds = bounds_of(metric)
        if row is not None and row.buckets and bounds and tuple(bounds) != DEFAULTS[row.buckets]:
            found[row.buckets] = bounds
    return found


def _features(collector: Any) -> list[str]:
    return [name for attribute, name in FEATURES.items() if getattr(collector, attribute, False)]


def _shown(labels: Mapping[str, Any]) -> dict[str, str]:
    """Labels of the engine. Empty ones, such as a priority's, are filled in by request."""
    return {name: printable(value) for name, value in labels.items() if str(value)}
