"""Resource usage of an engine's processes: CPU, memory, descriptors, threads, garbage collection.

vLLM's API server exposes these metrics for itself only; its engine cores and their workers, which
hold the memory, expose none. The publisher thread reads them about once a second.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import multiprocessing
import os
import platform
import resource
import time
from pathlib import Path
from typing import Literal

from sidestep.protocol.limits import VALUE_LIMIT
from sidestep.protocol.self_described import Family, Sample
from sidestep_adapters.publisher.process_hooks import weak

PREFIX = "sidestep_engine_process_"
LISTING_CALLS = 60
"""Calls between two listings of the open descriptors, where the kernel does not count them."""
PYTHON = {
    "implementation": platform.python_implementation(),
    **dict(zip(("major", "minor", "patchlevel"), platform.python_version_tuple(), strict=True)),
    "version": platform.python_version(),
}
"""Labels of this interpreter, as prometheus_client's ``python_info`` has them."""

Kind = Literal["counter", "gauge"]


class ProcessTap:
    """Reader of a process's usage, which remembers the counter values it has reported.

    A forked child reports under a process name of its own: one series fed by two live
    processes would jump between their values.

    Args:
        process: Value of the label ``process``, such as ``api0``.
        pid: The process, a child of this one; 0: this one, whose interpreter is read, too.
        proc: The process's directory in procfs, if it is not the usual one.
    """

    def __init__(self, process: str, *, pid: int = 0, proc: str = "") -> None:
        self._process = process
        self._pid = pid
        self._proc = proc or f"/proc/{pid or 'self'}"
        self._fds = Path(self._proc) / "fd"
        self._reset()
        if not pid:
            os.register_at_fork(after_in_child=weak(self.after_fork))

    def families(self) -> list[Family]:
        """Return the current resource usage, as far as the system provides it.

        Counters are increases since the previous call, or totals in the first call.
        """
        families = self._stat_families()
        if not self._pid:
            families += [
                # CPU time of all threads, to the nanosecond; procfs counts in hundredths of a second.
                self._counters("cpu_seconds_total", [], [([], time.process_time())]),
                *self._gc_families(),
                self._family("gauge", "python_info", [*PYTHON], [([*PYTHON.values()], 1)]),
            ]
        elif not families:
            return []  # The child has ended.
        families += self._descriptor_families()
        return [family for family in families if family.samples]

    def after_fork(self) -> None:
        """Restart reporting in a forked child, without the parent's garbage collections."""
        self._process = f"{self._process}/{os.getpid()}"
        self._reset()
        self._gc_families()

    def _reset(self) -> None:
        self._reported: dict[tuple[str, ...], float] = {}
        self._started: float | None = None
        self._counted_by_kernel = False
        self._listed: int | None = None
        self._calls = 0

    def _stat_families(self) -> list[Family]:
        """Return memory, threads and times from the file ``stat``, see proc_pid_stat(5)."""
        try:
            fields = _stat_fields(self._proc)
            cpu = int(fields[11]) + int(fields[12])
            threads, ticks, size, pages = (int(fields[at]) for at in (17, 19, 20, 21))
        except (OSError, ValueError, IndexError):
            return []
        families = [
            self._gauge("resident_memory_bytes", pages * resource.getpagesize()),
            self._gauge("virtual_memory_bytes", size),
            self._gauge("threads", threads),
        ]
        if self._pid:
            seconds = cpu / os.sysconf("SC_CLK_TCK")
            families.append(self._counters("cpu_seconds_total", [], [([], seconds)]))
        with contextlib.suppress(AttributeError, OSError, ValueError):
            # Measured once: two clocks are read one after the other.
            self._started = self._started or time.time() - _age(ticks)
            families.append(self._gauge("start_time_seconds", self._started))
        return families

    def _descriptor_families(self) -> list[Family]:
        families = []
        # A child may have ended by now.
        with contextlib.suppress(OSError):
            if self._pid:
                limit, _ = resource.prlimit(self._pid, resource.RLIMIT_NOFILE)
            else:
                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            if limit != resource.RLIM_INFINITY:
                families.append(self._gauge("max_fds", limit))
            families.append(self._gauge("open_fds", self._open_descriptors()))
        return families

    def _open_descriptors(self) -> int:
        """Return the number of open descriptors, without listing them wherever possible.

        A listing releases and reacquires the interpreter lock for every entry: beside a busy
        engine thread, 10,000 entries take a third of a second. Since Linux 6.2 the size of the
        directory is the number of descriptors; it is used once a listing has confirmed it.
        """
        size = self._fds.stat().st_size
        if self._counted_by_kernel:
            return size
        if self._listed is None or self._calls % LISTING_CALLS == 0:
            names = os.listdir(self._fds)  # noqa: PTH208 - a Path for each entry would double the cost
            # Without the listing's own descriptor, which is this process's.
            self._listed = len(names) - (not self._pid)
            self._counted_by_kernel = self._listed == size
        self._calls += 1
        return self._listed

    def _gc_families(self) -> list[Family]:
        generations = [([str(number)], stats) for number, stats in enumerate(gc.get_stats())]
        return [
            self._counters(
                f"gc_{suffix}_total",
                ["generation"],
                [(own, float(stats[suffix])) for own, stats in generations],
            )
            for suffix in ("collections", "collected", "uncollectable")
        ]

    def _gauge(self, name: str, value: float) -> Family:
        return self._family("gauge", name, [], [([], value)])

    def _counters(
        self, name: str, labels: list[str], totals: list[tuple[list[str], float]]
    ) -> Family:
        """Return increases of counters; counters that did not change are left out."""
        grown = []
        for own, total in totals:
            key = (name, *own)
            before = self._reported.get(key)
            self._reported[key] = total
            if before is None or total > before:
                grown.append((own, total - (before or 0.0)))
        return self._family("counter", name, labels, grown)

    def _family(
        self, kind: Kind, name: str, labels: list[str], values: list[tuple[list[str], float]]
    ) -> Family:
        # Label names are sorted, as in the catalogue's rows.
        at = bisect.bisect(labels, "process")
        samples = [
            Sample([*own[:at], self._process, *own[at:]], float(value))
            for own, value in values
            if abs(value) <= VALUE_LIMIT
        ]
        return Family(PREFIX + name, kind, [*labels[:at], "process", *labels[at:]], samples)


class WorkerTaps:
    """Readers of the worker processes that this process has started by multiprocessing until now.

    Args:
        prefix: Prefix of the workers' names as processes; the rest is their number.
    """

    def __init__(self, prefix: str) -> None:
        self._parent = os.getpid()
        # Listing children also reaps those that have ended, as the engine's own threads do: once, in
        # the engine's thread, it cannot take an exit status from them.
        self._taps = [
            ProcessTap(f"worker{child.name.removeprefix(prefix)}", pid=child.pid)
            for child in multiprocessing.active_children()
            if child.pid is not None and child.name.startswith(prefix)
        ]

    def families(self) -> list[list[Family]]:
        """Return the usage of each worker that has not ended; see ``ProcessTap.families``."""
        if os.getpid() != self._parent:
            # A forked child does not count its parent's workers once more.
            return []
        return [found for tap in self._taps if (found := tap.families())]


def process_age() -> float | None:
    """Return the seconds since this process started; None where the system does not provide it."""
    try:
        return max(_age(int(_stat_fields("/proc/self")[19])), 0.0)
    except (AttributeError, OSError, ValueError, IndexError):
        return None


def _stat_fields(proc: str) -> list[bytes]:
    # The program name, in parentheses, may contain spaces and parentheses.
    return Path(proc, "stat").read_bytes().rpartition(b")")[2].split()


def _age(ticks: int) -> float:
    """Return the seconds since ``ticks`` after boot; the boot time in procfs has whole seconds only."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
