"""The publisher over real sockets, with real exporters that start and stop."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exporters import Start, until
from key_ring import Ring
from peers import ENGINE, count, publisher
from python_programs import run_python
from sidestep.app.exporter import Exporter
from sidestep.metrics.computed_gauges import scalar
from sidestep_adapters.publisher import publisher as push
from sidestep_adapters.publisher.publisher import CONNECT_TIMEOUT, FLUSH_INTERVAL, Publisher
from sidestep_adapters.publisher.queue import (
    FLUSH_RECORDS,
    MAX_INTERVALS,
    QUEUE_ITEMS,
    next_interval,
)
from sidestep_adapters.vllm.stats import VllmTap


def generated(exporter: Exporter) -> int:
    """Return the generated tokens on the page."""
    engine = exporter.registry.engines.get("e")
    return 0 if engine is None else int(scalar(engine, "vllm:generation_tokens_total"))


async def test_an_exporter_that_starts_later_gets_all_items(start: Start, tmp_path: Path) -> None:
    """Until then items wait; nothing blocks and nothing is lost."""
    one = publisher(f"ipc://{tmp_path}/ingest.ipc")
    for _ in range(100):
        one.push(count())
    await until(lambda: one.queued == 0)
    async with start() as exporter:
        await until(lambda: generated(exporter) == 100)
        await asyncio.to_thread(one.close)


async def test_the_rest_is_sent_to_an_exporter_that_returns_during_the_end(start: Start) -> None:
    """An exporter that is restarted, or closes all connections, takes the rest within the timeout."""
    async with start() as exporter:
        one = publisher(exporter.endpoints[0])
        await until(lambda: one.connected)
    for _ in range(100):
        one.push(count())
    begun = time.monotonic()
    closing = asyncio.create_task(asyncio.to_thread(one.close, 30.0))
    await until(lambda: one.queued == 0 and time.monotonic() > begun + 2 * CONNECT_TIMEOUT)
    async with start() as exporter:
        await closing
        assert generated(exporter) == 100


KILLED = """
import os, sys, time
from peers import publisher
one = publisher(sys.argv[1])
deadline = time.monotonic() + 30
while not one.connected:
    assert time.monotonic() < deadline
    time.sleep(0.01)
os._exit(0)
"""


async def test_a_short_process_after_a_killed_one_is_counted(start: Start) -> None:
    """The exporter answers once it knows that the other one is dead, and the process waits meanwhile."""
    async with start() as exporter:
        await asyncio.to_thread(run_python, KILLED, exporter.endpoints[0])
        one = publisher(exporter.endpoints[0])
        one.push(count())
        await asyncio.to_thread(one.close, 30.0)

        assert generated(exporter) == 1


async def test_the_exporters_sample_rate_is_received_and_updated(start: Start) -> None:
    """The rate is unknown before the first answer; a change reaches an idle engine, too."""
    async with start(kv_sample_rate="0.25") as exporter:
        one = publisher(exporter.endpoints[0])
        assert one.kv_sample_rate is None
        await until(lambda: one.kv_sample_rate == 0.25)
        for rate in (0.5, 0.0):
            exporter.adjust(dataclasses.replace(exporter.config, kv_sample_rate=rate))
            await until(lambda: one.kv_sample_rate == rate)  # noqa: B023 - awaited here
        await asyncio.to_thread(one.close)


def test_push_makes_no_call_that_could_block(tmp_path: Path) -> None:
    """The step's thread takes no lock, encodes nothing and makes no system call."""
    one = publisher(f"ipc://{tmp_path}/nobody.ipc")
    item = count()
    called: list[str] = []

    def record(_: object, event: str, what: object) -> None:
        if event == "c_call":
            called.append(getattr(what, "__qualname__", repr(what)))

    sys.setprofile(record)
    one.push(item)
    _ = one.kv_sample_rate
    sys.setprofile(None)
    one.close(timeout=0.1)

    assert set(called) <= {"len", "deque.append", "setprofile"}


def voluntary_switches(thread: str) -> int:
    """Return how often the thread of this process has given up the processor by itself."""
    (found,) = (t for t in threading.enumerate() if t.name == thread)
    status = Path(f"/proc/self/task/{found.native_id}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))
    return int(line.split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads procfs")
async def test_small_steps_wake_the_publisher_seldom(start: Start) -> None:
    """At 100 steps a second there are about four frames a second, and hardly more wakes."""
    seconds = 3.0
    async with start() as exporter:
        one = Publisher(exporter.endpoints[0], "s", [ENGINE])
        await until(lambda: one.connected)
        one.push(count())
        await until(lambda: generated(exporter) == 1)
        frames = exporter.metrics.value("sidestep_messages_total", "batch")
        wakes = voluntary_switches("sidestep-publisher")
        began = time.monotonic()
        pushed = 1
        while (passed := time.monotonic() - began) < seconds:
            # On a machine that is too slow for the rate, steps that are late are left out.
            one.push(count())
            pushed += 1
            await asyncio.sleep(0.01)
        frames = exporter.metrics.value("sidestep_messages_total", "batch") - frames
        wakes = voluntary_switches("sidestep-publisher") - wakes
        await until(lambda: generated(exporter) == pushed)
        await asyncio.to_thread(one.close)

    flushes = passed / (MAX_INTERVALS * FLUSH_INTERVAL)
    assert frames <= flushes + 2
    assert wakes <= 4 * flushes


@pytest.mark.parametrize(
    ("interval", "records", "expected"),
    [
        (FLUSH_INTERVAL, 0, MAX_INTERVALS * FLUSH_INTERVAL),
        (FLUSH_INTERVAL, 10, MAX_INTERVALS * FLUSH_INTERVAL),
        (MAX_INTERVALS * FLUSH_INTERVAL, 50, MAX_INTERVALS * FLUSH_INTERVAL),
        (MAX_INTERVALS * FLUSH_INTERVAL, 2 * FLUSH_RECORDS, MAX_INTERVALS * FLUSH_INTERVAL / 2),
        (FLUSH_INTERVAL, FLUSH_RECORDS, FLUSH_INTERVAL),
        (MAX_INTERVALS * FLUSH_INTERVAL, QUEUE_ITEMS, FLUSH_INTERVAL),
    ],
)
def test_a_flush_waits_for_some_records_but_not_for_long(
    interval: float, records: int, expected: float
) -> None:
    """A flush comes after 250 ms while little is recorded, and every 50 ms while much is."""
    assert MAX_INTERVALS * FLUSH_INTERVAL == 0.25
    assert next_interval(interval, records, FLUSH_INTERVAL) == pytest.approx(expected)


def test_a_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dead publisher thread, pushing continues silently."""
    monkeypatch.setattr(Publisher, "_run", lambda _: None)
    one = publisher(f"ipc://{tmp_path}/nobody.ipc")
    for _ in range(QUEUE_ITEMS + 7):
        one.push(count())

    assert one.queued == QUEUE_ITEMS
    assert one.dropped == 7


async def test_items_of_a_refused_stream_are_dropped_and_counted(start: Start) -> None:
    """A source in the exporter has its name: what is queued then is counted, and what comes later."""
    async with start() as exporter:
        exporter.intake.receiver.attach("s", incarnation=99)
        one = Publisher(exporter.endpoints[0], "s", [ENGINE], flush_interval=0.5)
        one.push(count())
        await until(lambda: one.refused)
        for _ in range(QUEUE_ITEMS + 7):
            one.push(count())
        await asyncio.to_thread(one.close)
        one.push(count())

    assert (one.queued, one.dropped) == (0, 1 + QUEUE_ITEMS + 7 + 1)


async def test_an_idle_engines_gauges_return_with_the_exporter(
    start: Start, tmp_path: Path
) -> None:
    """An idle engine sends nothing, and its sleep state was sent once."""
    endpoint = f"ipc://{tmp_path}/ingest.ipc"
    one = Publisher(
        endpoint,
        "s",
        [ENGINE],
        flush_interval=0.01,
        current_state=lambda: list(tap.current_state()),
    )
    tap = VllmTap(one.push, one.fail, [0])
    tap.record_sleep_state(1, 2)
    tap.record(SimpleNamespace(num_running_reqs=7), None, None, 0)

    def shown(exporter: Exporter) -> tuple[float, float]:
        engine = exporter.registry.engines.get("e")
        if engine is None:
            return (0, 0)
        asleep = engine.layout.find("vllm:engine_sleep_state").slots[2]
        return (scalar(engine, "vllm:num_requests_running"), engine.values[asleep] or 0)

    async with start() as first:
        await until(lambda: shown(first) == (7, 1))
    async with start() as second:
        await until(lambda: shown(second) == (7, 1), timeout=20)
        await asyncio.to_thread(one.close)


async def test_an_item_that_cannot_be_encoded_drops_only_itself(start: Start) -> None:
    """The failure is counted and reported to the exporter; later items of the same record arrive."""
    async with start() as exporter:
        one = publisher(exporter.endpoints[0])
        bad = count()
        bad.iteration = object()  # type: ignore[assignment]
        one.push(lambda: [count(), bad, count()])
        one.push(count())
        await until(lambda: generated(exporter) == 3)
        await until(lambda: exporter.ingest.intake.receiver.streams["s"].errors == 1)
        await asyncio.to_thread(one.close)

        assert one.errors == 1


FORK = """
import os, sys, time
from peers import count, publisher
one = publisher(sys.argv[1])
one.push(count(1))
deadline = time.monotonic() + 30
while not one.drained:
    assert time.monotonic() < deadline
    time.sleep(0.01)
child = os.fork()
if child == 0:
    assert one.queued == 0
    one.push(count(10))
    # As multiprocessing leaves a child: past atexit, but not past finalizers.
    from multiprocessing import util
    util._exit_function()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
one.push(count(100))
sys.exit(0)
"""


async def test_a_forked_child_is_a_stream_of_its_own(start: Start) -> None:
    """The parent's queue and socket are untouched; both processes count."""
    async with start() as exporter:
        await asyncio.to_thread(run_python, FORK, exporter.endpoints[0])
        await until(lambda: generated(exporter) == 111)

        assert len(exporter.ingest.intake.receiver.streams) == 2


FORK_EARLY = """
import os, sys, threading, time
from peers import count, publisher
importing, forked = threading.Event(), threading.Event()
class Finder:
    def find_spec(name, *_):
        if name == sys.argv[2] and threading.current_thread().daemon:
            importing.set()
            forked.wait(30)
sys.meta_path.insert(0, Finder)
one = publisher(sys.argv[1])
while not (one.connected or importing.is_set()):
    time.sleep(0.01)
child = os.fork()
forked.set()
one.push(count(1 if child else 10))
one.close(20.0)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("module", ["sidestep.transport.client_socket", "stringprep"])
async def test_a_child_that_is_forked_at_once_can_connect(
    module: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent's publisher thread imports nothing meanwhile, of which the child would have half.

    Connections with keys have a module of their own, and a codec resolves the names of hosts.
    """
    flags: dict[str, Any] = {"ingest_endpoint": ("tcp://127.0.0.1:*",)}
    if module.startswith("sidestep"):
        ring = Ring(tmp_path)
        ring.environ(monkeypatch, ring.engine("a"))
        flags = ring.flags
    async with start(**flags) as exporter:
        await asyncio.to_thread(run_python, FORK_EARLY, exporter.endpoints[0], module)

        assert generated(exporter) == 11


async def test_a_caller_need_not_wait_for_the_goodbye(start: Start) -> None:
    """The publisher thread sends what is queued and closes the stream; a further call only waits."""
    async with start() as exporter:
        one = publisher(exporter.endpoints[0])
        await until(lambda: one.connected)
        one.push(count())
        # On the exporter's own event loop: a call that waited would keep it from answering.
        one.close(wait=False)
        await until(lambda: generated(exporter) == 1)
        (engine,) = exporter.registry.engines.values()
        await until(lambda: not engine.feeds.streams)
        one.close()

    assert "sidestep-publisher" not in {thread.name for thread in threading.enumerate()}


def test_a_bug_in_the_publisher_is_contained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors are counted and logged once a minute, and the thread continues."""

    def broken(*_: object) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(Publisher, "_pump", broken)
    one = publisher(f"ipc://{tmp_path}/x.ipc")
    deadline = time.monotonic() + 10
    while one.errors < 3 and time.monotonic() < deadline:
        threading.Event().wait(0.01)

    assert one.errors >= 3
    assert len([r for r in caplog.records if r.name == push.__name__]) == 1
    monkeypatch.undo()
    one.close()
