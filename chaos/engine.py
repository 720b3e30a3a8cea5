"""An engine process: pushes items at a fixed rate, and knows to the item what it pushed.

Run by the driver. A command a line on standard input, an answer a line of JSON on
standard output: ``report``, ``phase NAME`` (latencies from now on belong to it),
``pause`` (push no more), ``stop`` (close the publisher, report, end).

One thread plays the engine's step loop: it makes an item, works as long as it is
told to, pushes, and sleeps until the next one is due. How many items were pushed
also stands in a mapped file after every push, for whoever finds the process killed.
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

from chaos.latency import Latencies
from chaos.traffic import ENGINES, MODEL, Traffic, infos
from sidestep_adapters.publisher.publisher import Publisher

STREAM = "chaos/engine"
COUNT = struct.Struct("<Q")
BIG = 256
"""Inter-token latencies of the items that are also told apart."""
CLOSE = 30.0
LATEST = 250_000_000
"""Nanoseconds behind which an item is not made up for: as many steps never happened."""
LOOK = 16
"""Pushes between two looks at what the publisher holds."""


class Phase:
    """What pushing cost while something went on.

    Attributes:
        push: Of every item.
        big: Of those with the most values.
        late: By how much the step thread woke later than it asked for.
    """

    def __init__(self) -> None:
        self.push, self.big, self.late = Latencies(), Latencies(), Latencies()

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        """All three."""
        return {"push": self.push.figures, "big": self.big.figures, "late": self.late.figures}


class Engine:
    """The step thread and its books."""

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
        with Path(args.progress).open("w+b") as file:
            file.write(COUNT.pack(0))
            file.flush()
            self._progress = mmap.mmap(file.fileno(), COUNT.size)
        self._thread = threading.Thread(target=self._run, name="chaos-step")
        self._thread.start()

    def enter(self, name: str) -> None:
        """Latencies are those of phase ``name`` from now on."""
        self.phase = self.phases.setdefault(name, Phase())

    def pause(self) -> None:
        """Push no more."""
        self._stop.set()
        self._thread.join()

    def report(self) -> dict[str, Any]:
        """Where it stands; the totals are those of all that was pushed until now."""
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
            "publisher_cpu": _cpu("sidestep-publisher"),
            "step_cpu": _cpu("chaos-step"),
            "rss_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            "phases": {name: phase.figures for name, phase in self.phases.items()},
            "totals": {key: value for page in pages for key, value in page.items()},
        }

    def _run(self) -> None:
        """Push item after item, each when it is due.

        A little that is late is made up for at once; no engine makes up for seconds in
        which the machine gave it no core.
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
            self.pushed += 1
            write(self._progress, 0, self.pushed)
            phase.push.note(spent)
            if latencies == BIG:
                phase.big.note(spent)
            if not self.pushed % LOOK:
                self.held = max(self.held, self.publisher.held_bytes)
                self.queued = max(self.queued, self.publisher.queued)
            due = max(due + interval, clock() - LATEST)
            wait = due - clock()
            if wait > 0:
                time.sleep(wait / 1e9)
                phase.late.note(max(clock() - due, 0))


def main() -> None:
    """Serve the driver until it says stop, or is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--progress", required=True, help="file for the number of items pushed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--source", type=int, default=1)
    parser.add_argument("--rate", type=float, default=2000.0, help="items a second")
    parser.add_argument("--work", type=float, default=0.0, help="microseconds of Python an item")
    engine = Engine(parser.parse_args())
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "stop":
            break
        if command == "phase":
            engine.enter(argument)
        elif command == "pause":
            engine.pause()
        print(json.dumps(engine.report() if command == "report" else {}), flush=True)
    engine.pause()
    engine.publisher.close(CLOSE)
    print(json.dumps(engine.report()), flush=True)


def _cpu(name: str) -> float:
    """CPU seconds of a thread of this process; 0 once it has ended."""
    for thread in threading.enumerate():
        if thread.name == name and thread.native_id is not None:
            stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="ascii")
            fields = stat.rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


if __name__ == "__main__":
    main()
