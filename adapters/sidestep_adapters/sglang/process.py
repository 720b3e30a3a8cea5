"""One process of SGLang: its engines, its publisher, and what it counts outside the collectors.

Each collector of a process (scheduler, tokenizer, radix cache, storage) is an engine of the
exporter, identified by the labels that the collector puts on all its series. Processes whose
collectors have the same labels feed the same engine, as they feed the same series of SGLang's
own page. Needs no SGLang itself.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from sidestep.catalog.buckets import DEFAULTS
from sidestep.catalog.row import Row
from sidestep.engines.items import Item
from sidestep.engines.sglang.dialect import DIALECT
from sidestep.engines.sglang.process_rows import PENDING, PROCESS
from sidestep.protocol.limits import printable
from sidestep.protocol.messages import CORE, DECODE, FRONT_END, KV_TRANSFER, PREFILL, EngineInfo
from sidestep.protocol.progress import Progress
from sidestep_adapters.publisher.environment import identity, versions
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.sglang.deferred_metrics import DeferredMetrics, MetricSource
from sidestep_adapters.sglang.limits import LimitRecorder
from sidestep_adapters.sglang.lookups import LookupRecorder
from sidestep_adapters.sglang.metric_stubs import SET, MetricStub

ROWS: Mapping[str, Row] = {row.name: row for row in DIALECT.rows_for()}
ENGINE_LABELS: Mapping[str, tuple[str, ...]] = {row.name: row.shared for row in (*PROCESS, PENDING)}
"""Families that a process counts outside the collectors, and the labels that identify their engine."""
ROLES = {"scheduler": CORE, "tokenizer": FRONT_END}
"""Roles of processes, by the roles of their collectors."""


class Process:
    """Recorded calls, engines and the publisher of one process of SGLang.

    Args:
        namespace: Prefix of all identities, see ``environment.namespace``.
        beside: Whether the collectors' own objects keep counting.

    Attributes:
        publisher: None before ``start``.
        limits: Recorder of the limits of this process's scheduler.
        lookups: Recorder of the lookups of a scheduler whose replica's other ranks do not have one.
        sources: Sources of recorded calls whose current state a restarted exporter needs.
        readers: Functions that record values which SGLang does not report. They run about once a
            second in the publisher thread.
        measures: Functions that measure an engine's progress at a monotonic time, or return None if
            they cannot. They run at each wake of the publisher thread.
        wrapped_families: Families of collectors, which their stubs report.
    """

    def __init__(self, endpoint: str, namespace: str, *, beside: bool) -> None:
        self.beside = beside
        self.deferred = DeferredMetrics()
        self.publisher: Publisher | None = None
        self.limits: LimitRecorder | None = None
        self.lookups: LookupRecorder | None = None
        self._endpoint = endpoint
        self._namespace = namespace
        self._model = ""
        self._failures = 0
        self._lock = threading.Lock()
        self._infos: list[EngineInfo] = []
        self.sources: list[MetricSource] = []
        self.readers: list[Callable[[], None]] = []
        self.measures: list[Callable[[float], Progress | None]] = []
        self.wrapped_families: set[str] = set()

    def start(self, name: str, model: str = "") -> None:
        """Start publishing, as the process ``name`` of this deployment, unless it has started.

        ``model`` is for a process without a collector that has it.
        """
        self._model = self._model or model
        if self.publisher is None:
            self.publisher = Publisher(
                self._endpoint,
                identity(self._namespace, self._model, name),
                self._infos,
                periodic_items=self._periodic_items,
                current_state=self._current_state,
                deferred=self.deferred,
                progress=self._progress,
            )
            self.publisher.errors += self._failures
            self.deferred.fail = self.publisher.fail

    def count_failure(self) -> None:
        """Count a part of the tap that could not be made, as an error of the stream once there is one."""
        if self.publisher is None:
            self._failures += 1
        else:
            self.publisher.errors += 1

    def engine(
        self,
        role: str,
        labels: Mapping[str, Any],
        features: list[str] | None = None,
        bounds: Mapping[str, list[float]] | None = None,
    ) -> int:
        """Return the index of the engine with these labels; empty ones are labels of its series."""
        own = _nonempty(labels)
        model = own.get("model_name", "")
        self._model = self._model or model
        others = sorted((name, value) for name, value in own.items() if name != "model_name")
        label_text = ",".join(f"{name}={value}" for name, value in others)
        name = identity(self._namespace, model, f"sglang/{role}/{label_text}" if own else "sglang")
        kv_transfer = {}
        if (serves := own.get("engine_type", "")) in (PREFILL, DECODE):
            kv_transfer = {KV_TRANSFER: {"role": serves}}
        # Both the engine's threads and the publisher thread call this.
        with self._lock:
            index = next((i for i, known in enumerate(self._infos) if known.id == name), None)
            if index is None:
                index = len(self._infos)
                described = EngineInfo(
                    name, "sglang", own, versions("sglang") | kv_transfer, role=ROLES.get(role, "")
                )
                self._infos.append(described)
            info = self._infos[index]
            info.features = sorted({*info.features, *(features or ())})
            info.bounds = {**info.bounds, **(bounds or {})}
            if self.publisher is not None:
                self.publisher.describe(self._infos)
        return index

    def describe_missing(self, engine: int, fields: Mapping[str, dict[str, str]]) -> None:
        """Describe the fields that SGLang's release lacks, as ``FieldCheck`` finds them."""
        with self._lock:
            self._infos[engine].info = {**self._infos[engine].info, **fields}
            if self.publisher is not None:
                self.publisher.describe(self._infos)

    def stub(self, engine: int, metric: Any, labels: Mapping[str, Any]) -> MetricStub:
        """Return a stub that replaces ``metric``, one of prometheus_client's."""
        name = family_name(metric)
        row = ROWS.get(name)
        # Requests fill in empty labels; a scheduler's priority applies to its queues only.
        engine_labels = _nonempty(labels) if row is None or row.extra_labels else labels
        stub = MetricStub(
            self.deferred,
            name,
            metric._type,
            engine=engine,
            labelnames=metric._labelnames,
            own=sorted(set(metric._labelnames) - engine_labels.keys()),
            help_text="" if row is not None else printable(metric._documentation),
            bounds=bounds_of(metric),
            self_described=row is None,
            native=metric,
            fixed_labels=labels,
            beside=self.beside,
        )
        self.sources.append(stub)
        return stub

    def _progress(self, now: float) -> list[Progress]:
        measured = [measure(now) for measure in self.measures]
        return [progress for progress in measured if progress is not None]

    def _periodic_items(self) -> Iterator[Item]:
        for reader in self.readers:
            try:
                reader()
            except Exception:  # noqa: BLE001 - another release may lack anything: the others go on
                self.deferred.fail("what SGLang does not report could not be read")
        return iter(())

    def _current_state(self) -> list[Item]:
        now = time.monotonic()
        return [item for source in self.sources for item in source.current_state(now)]


class ProcessFamilies:
    """Reader of families that a process counts in prometheus_client's objects outside the collectors.

    They are read through the registry, once the engine has imported it: counters and histograms
    as increases since the previous reading.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._stubs: dict[tuple[str, ...], MetricStub] = {}
        self._before: dict[tuple[str, ...], Any] = {}

    def __call__(self) -> None:
        """Read all families and record what changed."""
        client = sys.modules.get("prometheus_client")
        registry = getattr(client, "REGISTRY", None)
        if registry is None:
            return
        known: dict[str, Any] = dict(registry._names_to_collectors)
        for metric in {id(m): m for m in known.values() if is_metric(m)}.values():
            name = family_name(metric)
            if name in ENGINE_LABELS and name not in self._process.wrapped_families:
                self._read(name, metric)

    def _read(self, name: str, metric: Any) -> None:
        children = list(metric._metrics.items()) if metric._labelnames else [((), metric)]
        for values, child in children:
            labels = dict(zip(metric._labelnames, values, strict=True))
            stub = self._stub(name, metric, labels)
            key = (name, *values)
            if stub.kind == "gauge":
                stub.record(labels, child._value.get(), SET)
            elif stub.kind == "counter":
                now = child._value.get()
                before = self._before.get(key)
                if now != before:
                    stub.record(labels, now - (before or 0), 1)
                    self._before[key] = now
            else:
                self._read_histogram(key, stub, labels, child)

    def _stub(self, name: str, metric: Any, labels: dict[str, str]) -> MetricStub:
        engine_labels = {label: labels[label] for label in ENGINE_LABELS[name]}
        key = (name, *engine_labels.values())
        found = self._stubs.get(key)
        if found is None:
            engine = self._process.engine("process", engine_labels, bounds=custom_bounds([metric]))
            found = self._stubs[key] = self._process.stub(engine, metric, engine_labels)
        return found

    def _read_histogram(
        self, key: tuple[str, ...], stub: MetricStub, labels: dict[str, str], child: Any
    ) -> None:
        counts = [int(bucket.get()) for bucket in child._buckets]
        total = child._sum.get()
        known, sum_before = self._before.get(key, ([0] * len(counts), 0.0))
        if counts != known:
            grown = [now - before for now, before in zip(counts, known, strict=True)]
            stub.record(labels, (grown, total - sum_before), 1)
            self._before[key] = counts, total


def family_name(metric: Any) -> str:
    """Return the name of a family's samples: prometheus_client keeps a counter's without the suffix."""
    return f"{metric._name}_total" if metric._type == "counter" else str(metric._name)


def bounds_of(metric: Any) -> list[float]:
    """Return a histogram's bounds, without +Inf."""
    return [float(bound) for bound in getattr(metric, "_upper_bounds", ())][:-1]


def is_metric(value: Any) -> bool:
    """Return whether ``value`` is a metric of prometheus_client, without importing it."""
    return (
        getattr(value, "_type", "") in ("counter", "gauge", "histogram", "summary")
        and hasattr(value, "_labelnames")
        and not isinstance(value, MetricStub)
    )


def custom_bounds(metrics: Iterable[Any]) -> dict[str, list[float]]:
    """Return bounds that differ from the defaults, by bucket family."""
    found: dict[str, list[float]] = {}
    for metric in metrics:
        row = ROWS.get(family_name(metric))
        bounds = bounds_of(metric)
        if row is not None and row.buckets and bounds and tuple(bounds) != DEFAULTS[row.buckets]:
            found[row.buckets] = bounds
    return found


def _nonempty(labels: Mapping[str, Any]) -> dict[str, str]:
    """Return the engine's labels. Empty ones, such as a priority, are filled in by request."""
    return {name: printable(value) for name, value in labels.items() if str(value)}
