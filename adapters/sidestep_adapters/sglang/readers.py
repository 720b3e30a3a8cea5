"""Readers of values that SGLang does not report, run once a second in the publisher thread."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any

from sidestep.engines.sglang import process_rows as sglang_process
from sidestep_adapters.sglang.collectors import (
    Process,
    custom_bounds,
    family_name,
    is_metric,
)
from sidestep_adapters.sglang.metric_stubs import SET, MetricStub
from sidestep_adapters.sglang.stats import StatsRecorder

ENGINE_LABELS: Mapping[str, tuple[str, ...]] = {
    row.name: row.shared for row in (*sglang_process.PROCESS, sglang_process.PENDING)
}
"""Families that a process counts in objects outside the collectors, and the labels that identify
their engine.
"""


class QueueLengths:
    """Reader of how many requests a scheduler runs and has waiting, from its own lists.

    How many it runs at most is recorded once.

    SGLang's reports of both lag behind: by 40 iterations while decoding, by up to 30 seconds
    while idle, without limit while other ranks have work.
    """

    def __init__(self, reporter: Any, stats: StatsRecorder) -> None:
        # In older releases the scheduler reports itself.
        own = getattr(reporter, "scheduler", reporter)
        self._scheduler = weakref.ref(own)
        self._record = stats.record
        # Counts by priority would need a walk through the lists, and a prefill node's
        # running batch is never filled: there only the reports are used.
        mode = getattr(own, "disaggregation_mode", None)
        prefill = str(getattr(mode, "value", mode)).lower() == "prefill"
        by_priority = bool(getattr(own, "enable_priority_scheduling", False))
        self._enabled = not (prefill or by_priority)
        slots = getattr(own, "max_running_requests", None)
        if slots is not None:
            stats.record((), {"max_running_requests": slots}, 1)

    def __call__(self) -> None:
        """Record both lengths; runs on the scheduler's loop, too."""
        scheduler = self._scheduler()
        if self._enabled and scheduler is not None:
            queues = len(scheduler.running_batch.reqs), len(scheduler.waiting_queue)
            self._record((), queues, 1)


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
