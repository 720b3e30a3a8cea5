"""Hostile peers of all kinds beside an honest engine, for long: ``python -m fuzz.soak --minutes 30``.

An exporter subscribes to hostile publishers and polls hostile pages, while another process attacks its path and
its port. The exit code is 1 if the exporter ended, its honest engine's counts are not exact, its memory has risen,
or a kind of log line comes too often.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from fuzz.attacks import ATTACKS, attack
from fuzz.hostile_exporter import Behaviour, hostile_exporter
from fuzz.hostile_pages import PAGES
from fuzz.hostile_publisher import PUBLISHERS
from fuzz.siege import LIMITS, Siege
from fuzz.zmtp_peer import Address

MAX_GROWTH_MIB = 20
MAX_LINES = 10
"""Most log lines of a kind within a minute."""
SAMPLE = 0.5
"""Seconds between two samples of memory."""
SHARE = 5
"""Parts of the time; the least memory within the first and the last is compared, since floods add to it."""
LAST = 180.0
"""Seconds within which all items must arrive once the attacks have ended."""
LONG = 5.0
"""Minutes of a soak from which on memory can be compared."""


class Report:
    """Result of a soak."""

    def __init__(self, siege: Siege, samples: list[int], minutes: float) -> None:
        self.running = siege.process.running
        self.pushed = siege.honest.pushed
        self.exact = self.running and siege.waits_for(lambda: siege.counted() == self.pushed)
        self.counted = siege.counted() if self.running else 0
        part = max(len(samples) // SHARE, 1)
        # The first part has the start; the second is the first level.
        self.levels = min(samples[part : 2 * part] or [0]), min(samples[-part:] or [0])
        self.peak = max(samples, default=0)
        (self.line, self.lines), *_ = [*_lines(siege.process.said()).most_common(1), ("", 0)]
        self._is_long = minutes >= LONG

    @property
    def faults(self) -> list[str]:
        """Faults that were found, a line each."""
        found = {
            "the exporter has ended": not self.running,
            f"the page has {self.counted} of {self.pushed} tokens": self.running and not self.exact,
            f"{self.lines} lines in a minute: {self.line}": self.lines > MAX_LINES,
            "memory has risen": self._is_long and self.levels[1] > self.levels[0] + MAX_GROWTH_MIB,
        }
        return [fault for fault, there in found.items() if there]


def main() -> None:
    """Parse, attack, print."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    report = soak(parser.parse_args().minutes)
    first, last = report.levels
    print(f"memory: {first} MiB, {last} MiB at the end, {report.peak} MiB at most")
    print(f"most frequent line: {report.lines} in a minute: {report.line}")
    print("\n".join(report.faults) or "the page is exact")
    sys.exit(bool(report.faults))


def soak(minutes: float) -> Report:
    """Attack an exporter for ``minutes``."""
    with contextlib.ExitStack() as stack, _hostile_process() as hostile:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        publishers, pages = hostile.recv()
        flags = [*LIMITS]
        for endpoint in publishers:
            flags += ["--subscribe", f"kv-events={endpoint}"]
        for endpoint in pages:
            flags += ["--scrape", f"{endpoint.replace('tcp', 'http', 1)}/metrics,timeout=2"]
        siege = Siege(folder, flags)
        stack.callback(siege.process.kill)
        hostile.send((siege.path, ("127.0.0.1", siege.port)))
        samples = list(_samples(siege, 60 * minutes))
        hostile.send("end")
        siege.settled()
        hostile.send("end")
        # What an engine could not send when it ends is lost, so a slow machine gets its time here.
        siege.settled(LAST)
        siege.end()
        return Report(siege, samples, minutes)


@contextlib.contextmanager
def _hostile_process() -> Iterator[Connection]:
    """Run the attackers in a process of their own, so that they do not delay the honest engine's publisher."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_hostile, args=(there,))
    process.start()
    try:
        yield here
    finally:
        process.kill()
        process.join()


def _hostile(parent: Connection) -> None:
    """Serve hostile publishers and pages; attack the addresses that the parent sends.

    The attacks end at the parent's next message, and the servers at the one after it.
    """
    with contextlib.ExitStack() as stack:
        parent.send([list(_served(stack, behaviours)) for behaviours in (PUBLISHERS, PAGES)])
        stop = threading.Event()
        addresses: Iterable[Address] = parent.recv()
        attackers = [threading.Thread(target=_attack, args=(each, stop)) for each in addresses]
        for attacker in attackers:
            attacker.start()
        parent.recv()
        stop.set()
        for attacker in attackers:
            attacker.join()
        parent.recv()
        os._exit(0)


def _served(stack: contextlib.ExitStack, behaviours: Mapping[str, Behaviour]) -> Iterator[str]:
    for behaviour in behaviours.values():
        yield stack.enter_context(hostile_exporter(("127.0.0.1", 0), behaviour)).endpoint


def _attack(address: Address, stop: threading.Event) -> None:
    for name in itertools.cycle(ATTACKS):
        if stop.is_set():
            return
        attack(name, address, 1)


def _samples(siege: Siege, seconds: float) -> Iterator[int]:
    until = time.monotonic() + seconds
    while time.monotonic() < until and siege.process.running:
        yield siege.status("VmRSS")
        time.sleep(SAMPLE)


def _lines(log: str) -> Counter[str]:
    """Return the number of lines of each kind in the minute that has the most of it."""
    kinds: Counter[tuple[str, str]] = Counter()
    for line in log.splitlines():
        if found := re.match(r"(\d{4}-\S{11}):\S+ (.*)", line):
            kinds[found[1], re.sub(r"\d+|'[^']*'", "N", found[2])] += 1
    most: Counter[str] = Counter()
    for (_, kind), number in kinds.items():
        most[kind] = max(most[kind], number)
    return most


if __name__ == "__main__":
    main()
