"""Engines, adapters, tenants and requests that come and go, beside hostile peers, for hours: ``make soak HOURS=2``.

An exporter with a state directory serves 64 engines. Each minute four of them end and four others start, its
configuration is reloaded, and for a quarter of the minute hostile connections flood its path and its port, and
the publishers and pages that it reads are hostile. In the first sixth of the time it is killed or stopped four
times and started again, and once more at the end. Each minute all counts are compared with what was pushed.

The exit code is 1 if a count differed, the exporter ended by itself, its memory rose by 1 % an hour or more in
the second half, its descriptors rose, its event loop was late although it had a core, or a kind of warning came
too often.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import itertools
import logging
import multiprocessing
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from chaos.cores import of_thread
from chaos.exporter import ExporterProcess, free_port
from chaos.records import MODEL, SUMS, TENANTS, Core
from chaos.watch import Page, parse, total

from fuzz.attacks import ATTACKS, attack
from fuzz.hostile_exporter import hostile_exporter
from fuzz.hostile_pages import PAGES
from fuzz.hostile_publisher import PUBLISHERS
from fuzz.zmtp_peer import Address

RATE = 2.0
"""Requests a second of each engine."""
GUESTS = 0.2
"""Share of the requests whose tenant is new in this minute."""
PER_MINUTE = 4
"""New tenants, and new adapters, of each engine in a minute."""
HOSTS = (*PUBLISHERS.values(), *PAGES.values())
"""Behaviours of the ports that the exporter reads: publishers, then pages."""
CHURN = 16
"""One of so many engines is replaced in a minute; there are one and a half times as many names as engines."""
ATTACKED = 0.25
"""Share of a minute in which hostile connections are made."""
RESTARTS = 4
"""In the first sixth: an exporter's memory has been level 40 minutes after its start."""
ROWS = 18
"""Lines of the table, about."""
PATIENCE = 120.0
"""Most seconds that a comparison waits until all has arrived; on a slow machine the next minute's serves."""
LAST = 1800.0
"""The same for the last one."""
MAX_GROWTH = 1.0
"""Most percent an hour by which memory may rise."""
MAX_SKIPPED = 5
MAX_MORE_FILES = 8
MAX_LINES = 20
"""Most warnings of a kind within a minute, for each time that the exporter was started in it."""
MAX_LATE = 0.25
"""Seconds that the event loop may be late at the 99th percentile, without those that it waited for a core."""
MIN_HOURS = 0.5
"""Hours of a soak from which on the slope of memory means something."""
COLUMNS = (
    "minute", "engines", "requests", "compared", "differ", "restarts", "reloads", "hostile", "MiB", "files", "late ms", "own ms",
)  # fmt: skip
ROW = "{:>11}" * len(COLUMNS)


class Engine(Core):
    """An engine whose tenants and adapters change from minute to minute.

    Args:
        life: Number of this process among those of the engine, from 1.
        expected: What earlier processes have pushed, to which this one adds.
    """

    def __init__(self, endpoint: str, number: int, life: int, expected: Counter[str]) -> None:
        super().__init__(endpoint, number, RATE, life)
        self.expected = expected
        self.requests = self.minute = 0

    def names(self) -> tuple[str, str]:
        """Return a tenant that is always shown, or a new one, and an adapter of this minute."""
        new = f"{self.minute}-{self.random.randrange(PER_MINUTE)}"
        is_guest = self.random.random() < GUESTS
        return f"guest-{new}" if is_guest else self.random.choice(TENANTS), f"adapter-{new}"

    def ended(self, request: int) -> None:  # noqa: ARG002 - records are not compared here
        """Count a request."""
        self.requests += 1

    def differences(self, page: Page, sums: Mapping[tuple[str, str], float]) -> Iterator[str]:
        """Yield the sums and the series of tenants that differ from what was pushed."""
        for ours, own in SUMS.items():
            wanted = sum(n for series, n in self.expected.items() if series.startswith(f"{ours}{{"))
            for family in (ours, own):
                if (shown := sums.get((family, self.engine), 0.0)) != wanted:
                    yield f"{family} of engine {self.engine}: {wanted} pushed, {shown:g} shown"
        for series, wanted in self.expected.items():
            if '"tenant-' in series and page.get(series, 0.0) != wanted:
                yield f"{series}: {wanted} pushed, {page.get(series, 0.0):g} shown"


@dataclasses.dataclass
class Minute:
    """Measurements of one minute.

    Attributes:
        at: Monotonic time of its begin.
        memory: Least resident memory, in MiB: floods add to it for a while.
        late: Delays of the event loop, as the exporter reports them.
        own: The same without the seconds that the loop's thread waited for a core.
    """

    at: float
    memory: float = 1e9
    files: int = 0
    late: list[float] = dataclasses.field(default_factory=list)
    own: list[float] = dataclasses.field(default_factory=list)


class Soak:
    """The exporter, its engines, and what was found so far; use it as a context.

    Attributes:
        compared: Number of comparisons of all counts.
        differences: Counts that differed from what was pushed.
    """

    def __init__(self, folder: Path, engines: int, hostile: Connection) -> None:
        self._hostile = hostile
        self.restarts = self.reloads = self.attacks = self.compared = self._requests = (
            self._ended
        ) = 0
        self._ports = [free_port() for _ in HOSTS]
        self._path, self._port = folder / "ingest" / "i.ipc", free_port()
        self._endpoint = f"ipc://{self._path}"
        self._config = folder / "sidestep.toml"
        self._write_config()
        flags = ["--ingest.endpoint", self._endpoint, "--config.file", str(self._config)]
        flags += ["--ingest.endpoint", f"tcp://127.0.0.1:{self._port}"]
        flags += ["--state.dir", str(folder / "state"), "--tenants.by", "cache-salt"]
        flags += ["--tenants.max", str(len(TENANTS) + 1)]
        for tenant in TENANTS:
            flags += ["--tenants.show", tenant]
        for port in self._ports[: len(PUBLISHERS)]:
            flags += ["--subscribe", f"kv-events=tcp://127.0.0.1:{port}"]
        for port in self._ports[len(PUBLISHERS) :]:
            flags += ["--scrape", f"http://127.0.0.1:{port}/metrics,timeout=2"]
        self.exporter = ExporterProcess(folder, flags)
        self._names = deque(range(engines + engines // 2))
        self._lives: Counter[int] = Counter()
        self._expected: dict[int, Counter[str]] = {}
        self._living: dict[int, Engine] = {}
        self._size = engines
        self._pushing, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._push, name="soak-engines")
        self.minutes: list[Minute] = []
        self.differences: list[str] = []

    def __enter__(self) -> Soak:  # noqa: PYI034 - Self is not yet in typing in 3.10
        self.exporter.start()
        self._join(self._size)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for engine in self._living.values():
            engine.close()
        self.exporter.kill()

    @property
    def row(self) -> tuple[object, ...]:
        """The line of the table for the last minute."""
        minute, engines = self.minutes[-1], sum(self._lives.values())
        late, own = (1000 * max(times, default=0) for times in (minute.late, minute.own))
        return (
            len(self.minutes), engines, self._requests + self._ended, self.compared, len(self.differences),
            self.restarts, self.reloads, self.attacks, f"{minute.memory:.1f}", minute.files,
            f"{late:.0f}", f"{own:.0f}",
        )  # fmt: skip

    def pass_minute(self, seconds: float, *, restarts: bool) -> None:
        """Attack, reload, measure, compare, and then replace engines."""
        number = len(self.minutes)
        begun = time.monotonic()
        self.minutes.append(Minute(begun))
        for engine in self._living.values():
            engine.minute = number
        addresses: Sequence[Address] = (self._path, ("127.0.0.1", self._port))
        self._hostile.send((addresses, self._ports, ATTACKED * seconds))
        self._measure(begun + seconds / 3)
        if restarts:
            self.restart()
        self._measure(begun + 2 * seconds / 3)
        self._reload()
        self._measure(begun + seconds)
        self.attacks += self._hostile.recv()
        self.compare()
        self._leave(max(1, self._size // CHURN))
        self._join(self._size)

    def restart(self) -> None:
        """Kill or stop the exporter, in turns, and start it again."""
        (self.exporter.terminate if self.restarts % 2 else self.exporter.kill)()
        self.restarts += 1
        self.exporter.start()

    def compare(self, patience: float = PATIENCE) -> bool:
        """Stop pushing until all has arrived, and compare every engine's counts; return whether all has arrived."""
        with self._pushing:
            engines = self._living.values()
            until = time.monotonic() + patience
            while not all(one.publisher.connected and one.publisher.drained for one in engines):
                if time.monotonic() > until:
                    return False
                time.sleep(0.05)
            time.sleep(0.3)  # as long as the exporter may repeat a page
            page = parse(self._page(""), MODEL)
            sums: Counter[tuple[str, str]] = Counter()
            for series, value in page.items():
                family, _, labels = series.partition("{")
                if found := re.search(r'engine="([^"]*)"', labels):
                    sums[family, found[1]] += value  # type: ignore[assignment]
            self._requests = sum(engine.requests for engine in engines)
            for engine in engines:
                for each in engine.differences(page, sums):
                    self.differences.append(f"minute {len(self.minutes)}: {each}")
                if engine.publisher.dropped or engine.publisher.errors:
                    self.differences.append(f"engine {engine.engine} dropped items")
        self.compared += 1
        return True

    def _push(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            with self._pushing:
                for engine in self._living.values():
                    engine.step()
            # What the machine had no time for is left out.
            due = max(due + 1 / RATE, time.monotonic())

    def _join(self, engines: int) -> None:
        while len(self._living) < engines:
            number = self._names.popleft()
            self._lives[number] += 1
            expected = self._expected.setdefault(number, Counter())
            engine = Engine(self._endpoint, number, self._lives[number], expected)
            with self._pushing:
                self._living[number] = engine

    def _leave(self, engines: int) -> None:
        for number in list(self._living)[:engines]:
            with self._pushing:
                engine = self._living.pop(number)
            # What it pushed since the comparison is on its way.
            engine.publisher.close(LAST)
            if not engine.publisher.drained:
                self.differences.append(f"the last items of engine {number} were not taken")
            self._ended += engine.requests
            self._names.append(number)

    def _reload(self) -> None:
        self.reloads += 1
        self._write_config()
        os.kill(self.exporter.pid, signal.SIGHUP)
        until = time.monotonic() + PATIENCE
        price = "sidestep_gpu_hour_price"
        while total(self._page(f"?name[]={price}"), price) != self.reloads:
            if time.monotonic() > until:
                self.differences.append(f"minute {len(self.minutes)}: the reload was not applied")
                return
            time.sleep(0.1)

    def _write_config(self) -> None:
        self._config.write_text(f"[prices]\ngpu-hour = {self.reloads}\n")

    def _measure(self, until: float) -> None:
        """Measure the exporter each second."""
        minute = self.minutes[-1]
        process = Path(f"/proc/{self.exporter.pid}")
        thread = process / "task" / process.name
        before = of_thread(thread)
        while (now := time.monotonic()) < until:
            time.sleep(min(1.0, until - now))
            with contextlib.suppress(OSError, http.client.HTTPException):
                page = self._page("?name[]=sidestep_loop_lag_seconds")
                minute.late.append(total(page, "sidestep_loop_lag_seconds"))
                _, waited = of_thread(thread).since(before)
                minute.own.append(max(0.0, minute.late[-1] - waited))
            before = of_thread(thread)
            resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            minute.memory = min(minute.memory, resident / (1 << 20))
            minute.files = len(list((process / "fd").iterdir()))

    def _page(self, query: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.exporter.port, timeout=PATIENCE)
        try:
            connection.request("GET", f"/metrics{query}")
            return connection.getresponse().read().decode()
        except OSError:
            if self.exporter.running:
                raise
            raise SystemExit(f"the exporter has ended: {self.exporter.said()[-1000:]}") from None
        finally:
            connection.close()


class Report:
    """Result of a soak.

    Attributes:
        growth: Growth of memory in the second half, in percent an hour.
        late: Delay of the event loop at the 99th percentile, in seconds.
        own: The same without the seconds that it waited for a core.
    """

    def __init__(self, soak: Soak, seconds: float) -> None:
        middle = soak.minutes[0].at + seconds / 2
        half = [one for one in soak.minutes if one.at >= middle] or soak.minutes[-1:]
        a_second = slope([(one.at, one.memory) for one in half])
        self.growth = 100 * 3600 * a_second / half[0].memory
        self.late = _high([each for one in soak.minutes for each in one.late])
        self.own = _high([each for one in soak.minutes for each in one.own])
        self.differences = soak.differences
        self.running = soak.exporter.running
        self.skipped = len(soak.minutes) + 1 - soak.compared
        self.files = half[-1].files - half[0].files
        (self.line, self.lines), *_ = [*_warnings(soak.exporter.said()).most_common(1), ("", 0)]
        self._is_long = seconds >= 3600 * MIN_HOURS
        self.most_lines = MAX_LINES if self._is_long else MAX_LINES * (1 + RESTARTS)

    @property
    def faults(self) -> list[str]:
        """Faults that were found, a line each."""
        found = {
            "the exporter has ended": not self.running,
            f"{len(self.differences)} counts differed": bool(self.differences),
            f"{self.lines} lines in a minute: {self.line}": self.lines > self.most_lines,
            "memory has risen": self._is_long and self.growth >= MAX_GROWTH,
            f"{self.skipped} comparisons found that not all had arrived": self._is_long
            and self.skipped > MAX_SKIPPED,
            "descriptors have risen": self._is_long and self.files > MAX_MORE_FILES,
            "the event loop was late": self._is_long and self.own > MAX_LATE,
        }
        return [fault for fault, there in found.items() if there] + self.differences[:10]


def main() -> None:
    """Parse, soak, print."""
    parser = argparse.ArgumentParser(
        prog="python -m fuzz.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--engines", type=int, default=64)
    options = parser.parse_args()
    # Each publisher would log each restart of the exporter.
    logging.disable(logging.WARNING)
    report = soak(3600 * options.hours, options.engines)
    print(f"memory in the second half: {report.growth:+.2f} % an hour")
    print(f"descriptors in the second half: {report.files:+d}")
    late, own = 1000 * report.late, 1000 * report.own
    print(f"event loop late, 99th percentile: {late:.0f} ms; while it had a core, {own:.0f} ms")
    print(f"most frequent warning: {report.lines} in a minute: {report.line}")
    print("\n".join(report.faults) or "all counts are exact, memory and descriptors are level")
    sys.exit(bool(report.faults))


def soak(seconds: float, engines: int, minute: float = 60.0) -> Report:
    """Run a soak of so many seconds, whose minutes have ``minute`` seconds, and print a table."""
    print(ROW.format(*COLUMNS), flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        _hostile_process() as hostile,
        Soak(Path(folder), engines, hostile) as running,
    ):
        begun, printed = time.monotonic(), 0
        while (past := (time.monotonic() - begun) / seconds) < 1:
            running.pass_minute(minute, restarts=running.restarts < min(RESTARTS, 24 * past))
            if past * ROWS >= printed:
                printed += 1
                print(ROW.format(*running.row), flush=True)
        running.restart()
        if not running.compare(LAST):
            running.differences.append("not all has arrived at the end")
        print(ROW.format(*running.row), flush=True)
        return Report(running, seconds)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of a line through points, as the median over all pairs, which outliers do not move."""
    pairs = itertools.combinations(points, 2)
    return statistics.median([(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs] or [0.0])


def _high(values: Sequence[float]) -> float:
    return sorted(values)[99 * len(values) // 100] if values else 0.0


@contextlib.contextmanager
def _hostile_process() -> Iterator[Connection]:
    """Run the attackers in a process of their own, so that they do not delay the engines' publishers."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_hostile, args=(there,))
    process.start()
    # Without it here, its end in the process is the last one: if the process dies, so does the soak.
    there.close()
    try:
        yield here
    finally:
        process.kill()
        process.join()


def _hostile(parent: Connection) -> None:
    """At each message of the parent, be hostile to its addresses and on its ports, for so many seconds.

    The answer is the number of connections.
    """
    names = itertools.cycle(ATTACKS)
    while True:
        addresses, ports, seconds = parent.recv()
        with contextlib.ExitStack() as stack:
            for port, behaviour in zip(ports, HOSTS, strict=True):
                # While nothing listens on a port, another program may take it.
                with contextlib.suppress(OSError):
                    stack.enter_context(hostile_exporter(("127.0.0.1", port), behaviour))
            parent.send(_attack(addresses, names, time.monotonic() + seconds))


def _attack(addresses: Iterable[Address], names: Iterator[str], until: float) -> int:
    made = 0
    while time.monotonic() < until:
        name = next(names)
        made += sum(attack(name, address, 1) for address in addresses)
    return made


def _warnings(log: str) -> Counter[str]:
    """Return the number of warnings of each kind in the minute that has the most of it."""
    kinds: Counter[tuple[str, str]] = Counter()
    for line in log.splitlines():
        if found := re.match(r"(\d{4}-\S{11}):\S+ ((?:WARNING|ERROR).*)", line):
            kinds[found[1], re.sub(r"\d+|'[^']*'", "N", found[2])] += 1
    most: Counter[str] = Counter()
    for (_, kind), number in kinds.items():
        most[kind] = max(most[kind], number)
    return most


if __name__ == "__main__":
    main()
