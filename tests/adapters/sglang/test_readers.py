"""Readers of values that SGLang does not report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter

from collectors import Shown
from python_programs import run_python
from sidestep_adapters.sglang.collectors import wrap
from sidestep_adapters.sglang.deferred_metrics import DeferredMetrics
from sidestep_adapters.sglang.process import Process, ProcessFamilies
from sidestep_adapters.sglang.stats import QueueLengths, StatsRecorder


class Scheduler:
    """The attributes of SGLang's scheduler that are read."""

    def __init__(self, **more: Any) -> None:
        self.running_batch = SimpleNamespace(reqs=[1, 2, 3])
        self.waiting_queue = [4]
        vars(self).update(more)


def test_queue_lengths_are_read_from_the_schedulers_lists() -> None:
    """Each reading records the current lengths; without a scheduler none is recorded."""
    deferred = DeferredMetrics()
    scheduler = Scheduler()
    queues = QueueLengths(SimpleNamespace(scheduler=scheduler), StatsRecorder(deferred, 0))
    queues()
    scheduler.waiting_queue.append(5)
    queues()
    del scheduler
    queues()

    assert [value for _, _, value, _ in deferred.queue] == [(3, 1), (3, 2)]


def test_a_reader_that_fails_keeps_no_other_from_reading() -> None:
    """Its failure is counted; a release may lack what one of them reads."""
    process = Process("ipc://nowhere", "pod", beside=False)
    failures, read = list[str](), list[int]()
    process.deferred.fail = failures.append
    process.readers += [lambda: read.append(1 // 0), lambda: read.append(2)]
    list(process._periodic_items())

    assert (len(failures), read) == (1, [2])


@pytest.mark.parametrize(
    "more",
    [
        {"enable_priority_scheduling": True},
        {"disaggregation_mode": SimpleNamespace(value="prefill")},
        {"disaggregation_mode": "PREFILL"},
    ],
)
def test_queue_lengths_come_from_reports_where_lists_do_not_have_them(more: dict[str, Any]) -> None:
    """Lists have no counts by priority, and a prefill node never fills its running batch."""
    deferred = DeferredMetrics()
    scheduler = Scheduler(**more)
    QueueLengths(SimpleNamespace(scheduler=scheduler), StatsRecorder(deferred, 0))()

    assert len(deferred) == 0


def test_families_of_collectors_are_not_read_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family with a stub is counted once."""
    process, registry = Process("ipc://nowhere", "pod", beside=False), CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    cpu = Counter("sglang:process_cpu_seconds_total", "Theirs.", ["component"], registry=registry)
    collector = SimpleNamespace(labels={}, cpu=cpu)
    wrap(process, collector, "process")
    collector.cpu.labels("scheduler").inc(2)
    ProcessFamilies(process)()
    cpu.labels("scheduler").inc(5)
    ProcessFamilies(process)()
    (value,) = Shown(process).page["sglang:process_cpu_seconds"].samples.values()

    assert value == 2


READING = """
    from prometheus_client import Counter, Gauge, Histogram, values
    from sidestep_adapters.sglang.process import Process, ProcessFamilies
    from collectors import ROWS, Shown

    process = Process("ipc://nowhere", "pod", beside=False)
    reader = ProcessFamilies(process)
    cpu = Counter("sglang:process_cpu_seconds_total", "Theirs.", ["component"])
    active = Gauge("sglang:http_requests_active", "Theirs.", ["endpoint", "method"],
                   multiprocess_mode="livesum")
    bounds = ROWS["sglang:func_latency_seconds"].bounds
    timed = Histogram("sglang:func_latency_seconds", "Theirs.", ["name"], buckets=bounds)
    Counter("sglang:somebody_elses_total", "Theirs.").inc()
    shown = Shown(process)
    for _ in range(2):
        cpu.labels("scheduler").inc(1.5)
        active.labels("/generate", "POST").set(2)
        timed.labels("f").observe(0.5)
        timed.labels("f").observe(1e6)
        reader()
        shown.take()
    active.labels("/generate", "POST").dec()
    reader()
    assert [info.labels for info in process._infos] == [{}]
    assert process.deferred.dropped == 0
    for family in shown.page.values():
        print(*(f"{name}={value:.9g}" for (name, _), value in family.samples.items()
                if not name.endswith("_bucket")))
"""


def test_families_of_a_process_are_read_with_and_without_multiprocess_files(tmp_path: Path) -> None:
    """As increases; the files are shared by all processes, and only this process's values are read."""
    expected = (
        "sglang:http_requests_active=1",
        "sglang:process_cpu_seconds_total=3",
        "sglang:func_latency_seconds_count=4 sglang:func_latency_seconds_sum=2000001",
    )
    for environment in ({}, {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}):
        assert sorted(run_python(READING, **environment).splitlines()) == sorted(expected)
    assert list(tmp_path.glob("*.db"))
