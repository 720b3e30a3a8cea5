"""What nobody tells of SGLang's processes, read about once a second in the publisher's thread."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any

from sidestep.engines.sglang import process_rows as sglang_process
from sidestep_adapters.sglang.collectors import (
    Process,
    Reader,
    StatsSource,
    family_name,
    is_metric,
    told_bounds,
)
from sidestep_adapters.sglang.metric_stubs import SET, Meter

SHARED: Mapping[str, tuple[str, ...]] = {
    row.name: row.shared for row in (*sglang_process.PROCESS, sglang_process.PENDING)
}
"""Families that a process counts for itself, in objects that belong to no collector, and
the labels that say which engine's they are."""


class Queues(Reader):
    """How many requests a scheduler runs and has waiting, by its own lists.

    Its reports of both lag behind: by 40 iterations where it decodes, by up to 30
    seconds where it has nothing to do, without end where other ranks have.
    """

    def __init__(self, reporter: Any, stats: StatsSource) -> None:
        # Older releases' scheduler does the reporting itself.
        own = getattr(reporter, "scheduler", reporter)
        self._scheduler = weakref.ref(own)
        self._note = stats.noted
        # By priority its lists would have to be gone through, and a prefill node's
        # running batch is never filled: there the reports have to do.
        mode = getattr(own, "disaggregation_mode", None)
        prefill = str(getattr(mode, "value", mode)).lower() == "prefill"
        by_priority = bool(getattr(own, "enable_priority_scheduling", False))
        self._told = not (prefill or by_priority)

    def __call__(self) -> None:
        """See ``Reader``; on the scheduler's loop, too."""
        scheduler = self._scheduler()
        if self._told and scheduler is not None:
            queues = len(scheduler.running_batch.reqs), len(scheduler.waiting_queue)
            self._note((), queues, 1)


class OwnFamilies(Reader):
    """Families that a process counts in objects of prometheus_client's.

    Read through its registry, once the engine has imported it: counters and
    histograms by how much they have grown since.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._meters: dict[tuple[str, ...], Meter] = {}
        self._before: dict[tuple[str, ...], Any] = {}

    def __call__(self) -> None:
        """See ``Reader``."""
        client = sys.modules.get("prometheus_client")
        registry = getattr(client, "REGISTRY", None)
        if registry is None:
            return
        known: dict[str, Any] = dict(registry._names_to_collectors)
        for metric in {id(m): m for m in known.values() if is_metric(m)}.values():
            name = family_name(metric)
            if name in SHARED and name not in self._process.wrapped:
                self._read(name, metric)

    def _read(self, name: str, metric: Any) -> None:
        children = list(metric._metrics.items()) if metric._labelnames else [((), metric)]
        for values, child in children:
            labels = dict(zip(metric._labelnames, values, strict=True))
            meter = self._meter(name, metric, labels)
            key = (name, *values)
            if meter.kind == "gauge":
                meter.note(labels, child._value.get(), SET)
            elif meter.kind == "counter":
                now = child._value.get()
                before = self._before.get(key)
                if now != before:
                    meter.note(labels, now - (before or 0), 1)
                    self._before[key] = now
            else:
                self._read_histogram(key, meter, labels, child)

    def _meter(self, name: str, metric: Any, labels: dict[str, str]) -> Meter:
        taken = {label: labels[label] for label in SHARED[name]}
        key = (name, *taken.values())
        found = self._meters.get(key)
        if found is None:
            engine = self._process.engine("process", taken, bounds=told_bounds([metric]))
            found = self._meters[key] = self._process.meter(engine, metric, taken)
        return found

    def _read_histogram(
        self, key: tuple[str, ...], meter: Meter, labels: dict[str, str], child: Any
    ) -> None:
        counts = [int(bucket.get()) for bucket in child._buckets]
        total = child._sum.get()
        known, sum_before = self._before.get(key, ([0] * len(counts), 0.0))
        if counts != known:
            grown = [now - before for now, before in zip(counts, known, strict=True)]
            meter.note(labels, (grown, total - sum_before), 1)
            self._before[key] = counts, total
