"""The faults: each does something to a stage, and has promises that must hold."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import zmq

from chaos import disk
from chaos.stage import Stage
from chaos.traffic import Traffic
from chaos.verdict import MARKERS, compare
from chaos.watch import RATE
from sidestep_adapters.publisher.publisher import FLUSH_INTERVAL
from sidestep_adapters.publisher.queue import FLUSH_RECORDS, MAX_INTERVALS

CALM = 3.0
"""Seconds without a fault between two faults; with ``quick`` a third of it."""
SELDOM = 1.0
"""Seconds between two scrapes while scrapes are rare."""
FEW_FILES = 64
CONNECTIONS = 150


class Skip(Exception):  # noqa: N818 - nothing is wrong
    """The fault is not possible here; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault and its promises.

    Attributes:
        phase: Name of its phase in the report.
        proxied: The engine connects through the chaos proxy.
    """

    run: Callable[[Stage], None]
    phase: str
    proxied: bool = False


def none(stage: Stage) -> None:
    """Do nothing, which measures the harness."""
    stage.rounds = 1
    stage.wait(_long(stage, 60.0, 6.0))


def kill(stage: Stage) -> None:
    """Kill the exporter with SIGKILL at random times, and start another one after a while.

    Before every other kill scrapes are rare: a scrape makes the exporter write its state,
    and so hides an acknowledgement of items that are not saved yet.
    """
    for turn in range(stage.options.rounds):
        stage.watch.interval = SELDOM if turn % 2 else 1 / RATE
        stage.wait(stage.between(0.2, 1.0) * _long(stage, 5.0, 2.0))
        stage.lose_exporter()
        stage.watch.interval = 1 / RATE
        stage.wait(stage.between(0.0, 1.0))
        stage.restore_exporter()
        stage.rounds += 1


def outage(stage: Stage) -> None:
    """Terminate the exporter, and start another one after ten minutes."""
    stage.lose_exporter(kill=False)
    stage.engine.ask("phase down")
    stage.wait(_long(stage, 600.0, 20.0))
    stage.engine.ask("phase after")
    stage.restore_exporter()
    stage.rounds = 1


def stop(stage: Stage) -> None:
    """Stop the exporter for half a minute: connections stay open without answers."""
    stage.exporter.halt()
    stage.wait(_long(stage, 30.0, 8.0))
    stage.exporter.go_on()
    stage.engine.ask("phase after")
    _calm(stage)
    stage.rounds = 1


def slow(stage: Stage) -> None:
    """Stop the exporter for 80 ms of every 100."""
    until = time.monotonic() + _long(stage, 60.0, 10.0)
    while time.monotonic() < until:
        stage.exporter.halt()
        time.sleep(0.08)
        stage.exporter.go_on()
        stage.wait(0.02)
    stage.engine.ask("phase after")
    stage.rounds = 1


def engine_kill(stage: Stage) -> None:
    """Kill the engine with SIGKILL, and start another process of the same stream.

    The items that arrived must be the first ones that were pushed. Only the last may be
    missing: those of one flush, and those that were pushed while the engine's threads
    waited for a core.
    """
    for _ in range(stage.options.rounds):
        stage.wait(stage.between(0.5, 1.0) * _long(stage, 5.0, 2.0))
        engine = stage.engine
        engine.kill()
        stage.replace_engine()
        page = stage.fresh_page()
        arrived = _arrived(stage, page)
        traffic = Traffic(engine.seed, engine.source)
        before = dict(stage.expected)
        stage.put(traffic, arrived, died=False)
        if compare(stage.expected, page, derived_apart=False).worst:
            stage.broken.append("what a killed engine left behind is no beginning of its stream")
        # Its successor's first item ends the requests that were in progress.
        stage.expected = before
        stage.put(traffic, arrived, died=True)
        unsent = engine.unsent(arrived)
        if unsent > _two_flushes(stage.options.rate) + engine.waited:
            stage.broken.append(f"{unsent:.3f} s of items died with an engine")
        stage.unsent.append(unsent)
        stage.waited += engine.waited
        stage.items += arrived
        stage.engine.ask("phase engine killed")
        stage.engine.ask("go")
        stage.rounds += 1
    _calm(stage)


def _two_flushes(rate: float) -> float:
    """Return the seconds of items that may be lost with an engine: a flush, and as much time to send it."""
    return 2 * max(FLUSH_INTERVAL, min(FLUSH_RECORDS / rate, MAX_INTERVALS * FLUSH_INTERVAL))


def ipc_stolen(stage: Stage) -> None:
    """Replace the exporter's ipc path with another socket for a while, during reconnects.

    Raises:
        Skip: The transport has no path.
    """
    if stage.options.transport != "ipc":
        raise Skip("there is a path with ipc only")
    path = Path(stage.endpoint.removeprefix("ipc://"))
    path.unlink()
    context = zmq.Context()
    thief = context.socket(zmq.ROUTER)
    thief.linger = 0
    thief.bind(stage.endpoint)
    # Without an answer for 3 s the engine connects anew, to whoever is there.
    stage.exporter.halt()
    stage.wait(5.0)
    stage.exporter.go_on()
    stage.wait(_long(stage, 10.0, 3.0))
    thief.close()
    context.term()
    path.unlink(missing_ok=True)
    stage.engine.ask("phase after")
    stage.rounds = 1
    if stage.wait_for(lambda: bool(stage.engine.report()["connected"]), 20.0):
        stage.notes.append("the exporter bound its path again by itself")
    else:
        stage.notes.append("the engine came back only when the exporter was started anew")
        stage.lose_exporter(kill=False)
        stage.restore_exporter()


def disk_full(stage: Stage) -> None:
    """Fill the state directory; the page must stay live, and snapshots continue afterwards.

    Raises:
        Skip: There is no state directory, or this user may not mount one.
    """
    if not stage.disk:
        raise Skip("needs --state.dir, and root to mount a small disk")
    filler = disk.fill(stage.state)
    before, errors = stage.watch.scrapes, stage.watch.errors
    stage.wait(_long(stage, 20.0, 4.0))
    if stage.watch.scrapes == before or stage.watch.errors > errors:
        stage.broken.append("the page was not live while the disk was full")
    filler.unlink()
    stage.wait(3.0)
    stage.lose_exporter()
    stage.restore_exporter()
    stage.rounds = 1


def torn(stage: Stage) -> None:
    """Cut off the snapshot or flip a bit of it between kill and restart.

    The next exporter must start without it, and log that. Totals are then those of items that
    were pushed since, and of items that the engine still held.

    Raises:
        Skip: There is no state directory.
    """
    if not stage.options.state:
        raise Skip("needs --state.dir")
    for turn in range(stage.options.rounds):
        stage.wait(5.0)
        stage.lose_exporter()
        held = stage.options.rate * 2.0
        logged = len(stage.exporter.said())
        before = stage.engine.pushed
        what = disk.tear(stage.state, stage.random, cut=turn % 2 == 0)
        if not what:
            stage.broken.append("the state directory was empty")
        stage.reset = True
        stage.restore_exporter()
        stage.notes.append(f"snapshot {what}")
        if "WARNING" not in (said := stage.exporter.said(logged).upper()) and "ERROR" not in said:
            stage.broken.append(f"an exporter whose snapshot was {what} did not say so")
        if _arrived(stage, stage.watch.page) > stage.engine.pushed - before + held:
            stage.broken.append(f"a snapshot that was {what} came back")
        stage.rounds += 1


def fds(stage: Stage) -> None:
    """Let the exporter open only 64 files, and make 150 connections."""
    resource.prlimit(stage.exporter.pid, resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES))
    with _connections(stage.endpoint, CONNECTIONS):
        stage.wait(_long(stage, 20.0, 5.0))
    stage.engine.ask("phase after")
    # libzmq 4.3.5 ends a process whose ipc listener has no descriptor left.
    stage.revive(known="ipc_listener.cpp")
    _calm(stage)
    stage.rounds = 1


def proxy(stage: Stage) -> None:
    """Delay, cut, reset, throttle or refuse connections between engine and exporter.

    Raises:
        RuntimeError: The stage has no proxy.
    """
    if stage.proxy is None:
        raise RuntimeError("the stage has no proxy")
    seconds = _long(stage, 600.0, 20.0)
    stage.proxy.begin(seconds)
    stage.wait(seconds + 0.5)
    stage.engine.ask("phase after")
    _calm(stage)
    counts = stage.proxy.proxy.counts
    stage.notes.append(", ".join(f"{what}: {count}" for what, count in sorted(counts.items())))
    stage.rounds = 1


def clock(_: Stage) -> None:
    """Change the wall clock.

    Raises:
        Skip: Always, since nothing here can change the clock of one process.
    """
    raise Skip("neither the exporter nor the system lets one process's clock be changed")


FAULTS: Mapping[str, Fault] = {
    "none": Fault(none, "up"),
    "kill": Fault(kill, "kills"),
    "outage": Fault(outage, "down"),
    "stop": Fault(stop, "stopped"),
    "slow": Fault(slow, "slow"),
    "engine-kill": Fault(engine_kill, "engine killed"),
    "ipc-stolen": Fault(ipc_stolen, "stolen"),
    "disk-full": Fault(disk_full, "disk full"),
    "torn": Fault(torn, "torn"),
    "fds": Fault(fds, "no descriptors"),
    "proxy": Fault(proxy, "proxy", proxied=True),
    "clock": Fault(clock, "clock"),
}


def _long(stage: Stage, seconds: float, quick: float) -> float:
    return quick if stage.options.quick else seconds


def _calm(stage: Stage) -> None:
    stage.wait(_long(stage, CALM, CALM / 3))


def _arrived(stage: Stage, page: Mapping[str, float]) -> int:
    """Return the items of the present engine on ``page``, by the counters that each item raises."""
    return sum(
        int(page.get(series, 0.0) - stage.expected.get(series, 0.0)) // each
        for series, (_, each) in MARKERS.items()
    )


@contextlib.contextmanager
def _connections(endpoint: str, count: int) -> Iterator[None]:
    """Open ``count`` silent connections."""
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            if endpoint.startswith("ipc://"):
                one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                address: str | tuple[str, int] = endpoint.removeprefix("ipc://")
            else:
                one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
                address = host, int(port)
            opened.append(one)
            one.settimeout(1.0)
            with contextlib.suppress(OSError):
                one.connect(address)
        yield
    finally:
        for one in opened:
            one.close()
