"""Resource usage of an engine's process: CPU, memory, descriptors, threads, garbage collection.

vLLM's API server exposes these metrics for itself only; its engine cores, which hold the
memory, expose none. The publisher thread reads them about once a second.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import time
import weakref
from pathlib import Path
from typing import Literal

from sidestep.protocol.limits import VALUE_LIMIT
from sidestep.protocol.self_described import Family, Sample

PREFIX = "sidestep_engine_process_"
LISTING_CALLS = 60
"""Calls between two listings of the open descriptors, where the kernel does not count them."""

Kind = Literal["counter", "gauge"]

_taps: weakref.WeakSet[ProcessTap] = weakref.WeakSet()


class ProcessTap:
    """Reads the usage of this process and remembers the counter values it has reported.

    A forked child reports under a process name of its own: one series fed by two live
    processes would jump between their values.

    Args:
        process: Value of the label ``process``, such as ``api0``.
        proc: The process's directory in procfs.
    """

    def __init__(self, process: str, *, proc: str = "/proc/self") -> None:
        self._process = process
        self._proc = proc
        self._fds = Path(proc) / "fd"
        self._reset()
        _taps.add(self)

    def families(self) -> list[Family]:
        """Return the current resource usage.

        Returns:
            Counters as increases since the previous call, as totals in the first call; gauges as
            current values. Families that the system does not provide are left out.
        """
        families = [
            # CPU time of all threads, to the nanosecond; procfs counts in hundredths of a second.
            self._counters("cpu_seconds_total", [], [([], time.process_time())]),
            *self._stat_families(),
            *self._descriptor_families(),
            *self._gc_families(),
        ]
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
        """Return memory, threads and start time from ``/proc/self/stat``, see proc_pid_stat(5)."""
        try:
            # The program name, in parentheses, may contain spaces and parentheses.
            fields = _content(f"{self._proc}/stat").rpartition(b")")[2].split()
            threads, ticks, pages = int(fields[17]), int(fields[19]), int(fields[21])
        except (OSError, ValueError, IndexError):
            return []
        families = [
            self._gauge("resident_memory_bytes", pages * resource.getpagesize()),
            self._gauge("threads", threads),
        ]
        if self._started is None:
            self._started = _start_time(ticks)
        if self._started is not None:
            families.append(self._gauge("start_time_seconds", self._started))
        return families

    def _descriptor_families(self) -> list[Family]:
        families = []
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY:
            families.append(self._gauge("max_fds", limit))
        with contextlib.suppress(OSError):
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
            self._listed = len(names) - 1  # without the descriptor of the listing
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
            for suffix in ("collections", "uncollectable")
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
        samples = [
            Sample([*own, self._process], float(value))
            for own, value in values
            if abs(value) <= VALUE_LIMIT
        ]
        # Label names are sorted, as in the catalogue's rows.
        return Family(PREFIX + name, kind, [*labels, "process"], samples)


def _content(path: str) -> bytes:
    # A file object would make three more system calls.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def _start_time(ticks: int) -> float | None:
    """Return the Unix time ``ticks`` after boot; the boot time in procfs has whole seconds only."""
    try:
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):
        return None


def _after_fork() -> None:
    for tap in list(_taps):
        tap.after_fork()


os.register_at_fork(after_in_child=_after_fork)
