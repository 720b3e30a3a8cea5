"""An engine process: pushes items at a fixed rate, and counts exactly what it pushed.

Run by the driver. A command a line on standard input, an answer a line of JSON on
standard output: ``report``, ``phase NAME`` (latencies from now on belong to it),
``go`` (begin to push, after ``--hold``), ``pause`` (push no more), ``stop`` (close the
publisher, report, end).

One thread plays the engine's step loop: it makes an item, works for the given time,
pushes, and sleeps until the next one is due. After every push a mapped file has the number
of pushed items and their times, which the driver reads once the process is killed.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

from chaos.cores import Cores, of_thread
from chaos.latency import Latencies
from chaos.traffic import ENGINES, MODEL, Traffic, infos
from sidestep_adapters.publisher.publisher import Publisher

STREAM = "chaos/engine"
STEP, PUBLISHER = "chaos-step", "sidestep-publisher"
COUNT = struct.Struct("<Q")
STAMPS = 16_384
"""Number of pushes whose times are in the file."""
BIG = 256
"""Inter-token latencies of the largest items, whose pushes are also measured separately."""
CLOSE = 30.0
LONG = 5_000_000
"""Nanoseconds from which on a push is examined for what delayed it."""
LATEST = 250_000_000
"""Nanoseconds of delay after which an item is left out: no engine catches up with so many steps."""
LOOK = 16
"""Pushes between two readings of the publisher's memory and of the threads' times on a core."""


def stamp_offset(item: int) -> int:
    """Return where the file has the time of a push, in nanoseconds of the monotonic clock."""
    return COUNT.size * (1 + item % STAMPS)


class Longest:
    """The longest push, and the times of the engine's two threads around it.

    A thread that is neither on a core nor waiting for one waits for the interpreter's lock.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.figures: dict[str, float] = {}
        self._threads: dict[str, Path] = {}
        self._before: dict[str, Cores] = {}

    def look(self) -> None:
        """Read the times of the threads."""
        if not self._threads:
            self._threads = {
                thread.name: Path(f"/proc/self/task/{thread.native_id}")
                for thread in threading.enumerate()
                if thread.name in (STEP, PUBLISHER)
            }
        self._before = {name: of_thread(folder) for name, folder in self._threads.items()}

    def note(self, seconds: float) -> None:
        """Record a push that took ``seconds``, if it is the longest."""
        if seconds <= self.seconds or not self._before:
            return
        self.seconds = seconds
        self.figures = {"seconds": seconds}
        for name, folder in self._threads.items():
            ran, waited = of_thread(folder).since(self._before[name])
            self.figures |= {f"{name} ran": ran, f"{name} waited": waited}


class Phase:
    """Cost of pushing during one phase of a run.

    Attributes:
        push: Latencies of all pushes.
        big: Latencies of the pushes with the most values.
        late: Delays with which the step thread woke.
    """

    def __init__(self) -> None:
        self.push, self.big, self.late = Latencies(), Latencies(), Latencies()

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        """Return the three figures of the phase."""
        return {"push": self.push.figures, "big": self.big.figures, "late": self.late.figures}


class Engine:
    """The step thread, and the record of its pushes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.traffic = Traffic(args.seed, args.source)
        self.publisher = Publisher(args.endpoint, STREAM, infos())
        self.rate: float = args.rate
        self.work: float = args.work * 1e-6
        self.pushed = 0
        self.held = 0
        self.queued = 0
        self.phases = {"up": Phase()}
        self.phase = self.phases["up"]
        self._stop = threading.Event()
        self.longest = Longest()
        with Path(args.progress).open("w+b") as file:
            file.truncate(COUNT.size * (1 + STAMPS))
            self._progress = mmap.mmap(file.fileno(), 0)
        self._thread = threading.Thread(target=self._run, name=STEP)
        if not args.hold:
            self.go()

    def go(self) -> None:
        """Begin to push."""
        self._thread.start()

    def enter(self, name: str) -> None:
        """Add latencies to phase ``name`` from now on."""
        self.phase = self.phases.setdefault(name, Phase())

    def pause(self) -> None:
        """Stop pushing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def report(self) -> dict[str, Any]:
        """Return the state of the engine, and the totals of all items pushed so far."""
        pushed = self.pushed
        tallies = self.traffic.tallies(pushed)
        pages = (tally.page(engine, MODEL) for tally, engine in zip(tallies, ENGINES, strict=True))
        return {
            "pid": os.getpid(),
            "pushed": pushed,
            "drained": self.publisher.drained,
            "connected": self.publisher.connected,
            "dropped": self.publisher.dropped,
            "errors": self.publisher.errors,
            "held": self.publisher.held_bytes,
            "held_peak": self.held,
            "queued_peak": self.queued,
            "publisher_cpu": _cores(PUBLISHER).ran,
            "publisher_waited": _cores(PUBLISHER).waited,
            "longest": self.longest.figures,
            "rss_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            "phases": {name: phase.figures for name, phase in self.phases.items()},
            "totals": {key: value for page in pages for key, value in page.items()},
        }

    def _run(self) -> None:
        """Push each item when it is due.

        Items that are a little late are pushed at once. Items of seconds in which the machine
        gave the engine no core are left out.
        """
        clock, push, write = time.perf_counter_ns, self.publisher.push, COUNT.pack_into
        interval = int(1e9 / self.rate)
        work = int(self.work * 1e9)
        due = clock()
        while not self._stop.is_set():
            item, latencies = self.traffic.item(self.pushed)
            begin = clock()
            while work and clock() - begin < work:
                pass
            phase = self.phase
            begin = clock()
            push(item)
            spent = clock() - begin
            write(self._progress, stamp_offset(self.pushed), begin)
            self.pushed += 1
            write(self._progress, 0, self.pushed)
            phase.push.note(spent)
            if spent > LONG:
                self.longest.note(spent / 1e9)
            if latencies == BIG:
                phase.big.note(spent)
            if not self.pushed % LOOK:
                self.held = max(self.held, self.publisher.held_bytes)
                self.queued = max(self.queued, self.publisher.queued)
                self.longest.look()
            due = max(due + interval, clock() - LATEST)
            wait = due - clock()
            if wait > 0:
                time.sleep(wait / 1e9)
                phase.late.note(max(clock() - due, 0))


def main() -> None:
    """Serve the driver until the driver ends or asks to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--progress", required=True, help="file for the number of items pushed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--source", type=int, default=1)
    parser.add_argument("--rate", type=float, default=2000.0, help="items a second")
    parser.add_argument("--hold", action="store_true", help="push nothing before go")
    parser.add_argument("--work", type=float, default=0.0, help="microseconds of Python an item")
    engine = Engine(parser.parse_args())
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "stop":
            break
        if command == "phase":
            engine.enter(argument)
        elif command == "go":
            engine.go()
        elif command == "pause":
            engine.pause()
        print(json.dumps(engine.report() if command == "report" else {}), flush=True)
    engine.pause()
    engine.publisher.close(CLOSE)
    print(json.dumps(engine.report()), flush=True)


def _cores(name: str) -> Cores:
    """Return the times of a thread of this process; 0 once it has ended."""
    for thread in threading.enumerate():
        if thread.name == name:
            return of_thread(Path(f"/proc/self/task/{thread.native_id}"))
    return Cores(0.0, 0.0)


if __name__ == "__main__":
    main()
