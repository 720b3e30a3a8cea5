"""Resource usage of a process, compared with other readers of the same process."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import CollectorRegistry

from python_programs import run_python
from sidestep.protocol.self_described import Family
from sidestep_adapters.publisher.process_metrics import (
    PREFIX,
    ProcessTap,
    WorkerTaps,
)

Values = dict[tuple[str, ...], float]
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no procfs here")


def values(families: list[Family]) -> Values:
    """Return values by short name and generation; the interpreter's without its labels."""
    return {
        (
            family.name.removeprefix(PREFIX),
            *sample.labels[: family.labels[0] == "generation"],
        ): sample.value
        for family in families
        for sample in family.samples
    }


def processes(family: Family) -> tuple[str, ...]:
    """Return the processes that a family's samples name."""
    at = family.labels.index("process")
    return tuple(sorted({sample.labels[at] for sample in family.samples}))


def value(tap: ProcessTap, name: str) -> float:
    """Return the value of a family without other labels."""
    return values(tap.families())[name,]


def test_every_family_of_prometheus_client_has_a_counterpart() -> None:
    """Its three collectors, which vLLM's API server has on its page, expose nothing else."""
    registry = CollectorRegistry()
    for kind in (ProcessCollector, PlatformCollector, GCCollector):
        kind(registry=registry)
    theirs = {
        sample.name.removeprefix("process_")
        .replace("python_gc_objects_", "gc_")
        .replace("python_gc", "gc")
        for metric in registry.collect()
        for sample in metric.samples
    }
    ours = {family.name.removeprefix(PREFIX) for family in ProcessTap("p").families()}

    assert ours == theirs | {"threads"}


def test_cpu_time_adds_up_to_the_processes() -> None:
    """User and system time of all threads: the sum of increases lies between two readings."""
    tap = ProcessTap("p")
    total = value(tap, "cpu_seconds_total")
    spinning = threading.Thread(target=lambda: sum(range(3_000_000)))
    spinning.start()
    for _ in range(20):
        sum(range(50_000))
        total += value(tap, "cpu_seconds_total")
    spinning.join()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    low = usage.ru_utime + usage.ru_stime
    total += value(tap, "cpu_seconds_total")
    usage = resource.getrusage(resource.RUSAGE_SELF)

    assert low - 0.01 <= total <= usage.ru_utime + usage.ru_stime + 0.01


def test_collections_add_up_to_the_interpreters() -> None:
    """Increases are by generation; unchanged generations are left out."""
    tap, sums = ProcessTap("p"), Values()
    gc.disable()
    try:
        for generation in (0, 1, 2, 2):
            for key, grown in values(tap.families()).items():
                sums[key] = sums.get(key, 0.0) + grown
            gc.collect(generation)
        last = values(tap.families())
        stats = gc.get_stats()
    finally:
        gc.enable()

    assert last["gc_collections_total", "2"] == 1
    assert ("gc_collections_total", "0") not in last
    for generation, stat in enumerate(stats):
        of = str(generation)
        total = sums["gc_collections_total", of] + last.get(("gc_collections_total", of), 0.0)
        assert total == stat["collections"]
        assert sums["gc_uncollectable_total", of] == stat["uncollectable"]


FORK = """
import gc, os, threading, time
from sidestep_adapters.publisher.process_metrics import ProcessTap

def numbers():
    return {(f.name[24:], *s.labels): s.value for f in tap.families() for s in f.samples}

tap = ProcessTap("p")
sum(range(20_000_000))
gc.collect(); gc.collect()
parent = numbers()
assert parent["cpu_seconds_total", "p"] > 0.2
gc.collect()
child = os.fork()
if child == 0:
    gc.collect()
    name = f"p/{os.getpid()}"
    mine = numbers()
    assert {key[-1] for key in mine if "python" not in key[0]} == {name}, mine
    assert mine["cpu_seconds_total", name] < 0.1, mine
    assert mine["gc_collections_total", "2", name] == 1, mine
    assert mine["threads", name] == 1, mine
    assert mine["start_time_seconds", name] > parent["start_time_seconds", "p"], mine
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
after = numbers()
assert after["gc_collections_total", "2", "p"] == 1, after
"""


def test_a_forked_child_reports_itself() -> None:
    """The child starts from zero under its own name; the parent is unaffected."""
    run_python(FORK)


@contextlib.contextmanager
def busy_children(*names: str) -> Iterator[Sequence[BaseProcess]]:
    """Run children of multiprocessing, started as vLLM starts its workers, that never end by themselves."""
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=sum, args=(range(10**12),), name=name) for name in names]
    for child in started:
        child.start()
    try:
        yield started
    finally:
        for child in started:
            child.kill()
            child.join()


def by_process(families: list[Family]) -> str:
    """Return the process of some families."""
    return processes(families[0])[0]


def test_workers_are_read_from_outside() -> None:
    """Each worker is a process by its number; other children are not read, nor workers that ended."""
    cpu = 0.0
    with busy_children("VllmWorker-0", "VllmWorker-11", "Other") as (_, second, _):
        taps = WorkerTaps("VllmWorker-")
        deadline = time.monotonic() + 30
        while cpu < 0.2:
            assert time.monotonic() < deadline
            families = dict(
                zip(("worker0", "worker11"), sorted(taps.families(), key=by_process), strict=True)
            )
            cpu += values(families["worker11"]).get(("cpu_seconds_total",), 0.0)
        found = {name: values(some) for name, some in families.items()}
        fields = Path(f"/proc/{second.pid}/stat").read_text().rpartition(")")[2].split()
        second.kill()
        second.join()
        left = taps.families()

    assert {processes(family) for some in families.values() for family in some} == {
        ("worker0",),
        ("worker11",),
    }
    ticks = os.sysconf("SC_CLK_TCK")
    assert 0.2 <= cpu <= (int(fields[11]) + int(fields[12])) / ticks
    for numbers in found.values():
        assert numbers["open_fds",] > 0
        assert numbers["max_fds",] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert numbers["threads",] >= 1
        assert numbers["virtual_memory_bytes",] > numbers["resident_memory_bytes",] > 1 << 20
        assert numbers["start_time_seconds",] == pytest.approx(time.time(), abs=60)
        assert numbers.keys().isdisjoint({("python_info",), ("gc_collections_total", "0")})
    assert [processes(some[0]) for some in left] == [("worker0",)]
    assert taps.families() == []
