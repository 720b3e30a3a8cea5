"""Limits on memory: with memory that the test sets, and in a real process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz import zmtp_peer

from command_line import serving
from exporters import Start, until
from pages import get
from peers import LABELS, count, publisher
from sidestep.errors import ConfigError
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import EngineInfo, Hello, Nack
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.listener import IngestListener
from sidestep.transport.process import resident
from sidestep.transport.upkeep import (
    FLOODED,
    MIB,
    PAUSE,
    TRIM_INTERVAL,
    Upkeep,
    Watchdog,
)
from socket_peers import connect

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]


class Memory:
    """Resident memory, set by the test."""

    def __init__(self) -> None:
        self.used = 0

    def __call__(self) -> int:
        """The reader."""
        return self.used


@pytest.mark.parametrize("is_enough", [True, False], ids=["enough", "not enough"])
def test_what_sources_hold_is_freed_before_connections_close(
    is_enough: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines lose their connections only where discarding what sources received frees too little."""
    memory = Memory()
    memory.used = 200
    cuts = []

    def cut() -> bool:
        cuts.append(memory.used)
        memory.used = 100 if is_enough else 200
        return True

    metrics = SelfMetrics()
    listener = IngestListener([f"ipc://{tmp_path}/own/i"])
    socket = listener.socket
    upkeep = Upkeep(listener, Watchdog(0, 200, memory), metrics, cut)
    assert upkeep.due(0.0)
    upkeep.act(0.0)

    assert cuts == [200]
    assert (listener.socket is socket) == is_enough
    assert metrics.value("sidestep_rebinds_total", "memory") == (0 if is_enough else 1)
    assert ("was discarded" in caplog.text) == is_enough
    assert not upkeep.due(PAUSE)
    listener.close(0)


def flooded(tmp_path: Path, *, accepted: int, drained: float = 0.0) -> bool:
    """Return whether connections are closed after 30 messages in a row, of which some were accepted."""
    metrics = SelfMetrics()
    listener = IngestListener([f"ipc://{tmp_path}/own/i"])
    total = [7]
    off = Watchdog(0, 0, lambda: 0)
    upkeep = Upkeep(listener, off, metrics, accepted=lambda: total[0])
    upkeep.note_arrival(drained, found=False)
    total[0] += accepted
    for _ in range(30):
        upkeep.note_arrival(1.0, found=True)
    if upkeep.due(FLOODED):
        upkeep.act(FLOODED)
    assert not upkeep.due(FLOODED)
    assert listener.socket is not None
    listener.close(0)
    return metrics.value("sidestep_rebinds_total", "flood") == 1


def test_a_flood_of_refused_messages_closes_all_connections(tmp_path: Path) -> None:
    """What libzmq has read waits although its peer has left, and engines behind it."""
    assert flooded(tmp_path, accepted=10)
    # Busy engines are no flood, and one that was dealt with in time is none.
    assert not flooded(tmp_path, accepted=16)
    assert not flooded(tmp_path, accepted=10, drained=0.1)


@pytest.mark.skipif(not hasattr(libc, "malloc_trim"), reason="only glibc has malloc_trim")
def test_free_memory_is_returned(tmp_path: Path) -> None:
    """Below a block that is in use the allocator retains it, and new streams would stay refused."""
    listener = IngestListener([f"ipc://{tmp_path}/own/i"])
    upkeep = Upkeep(listener, Watchdog(0, 0, resident), SelfMetrics())
    upkeep.due(0.0)
    size = 64 << 10
    *blocks, last = (libc.malloc(size) for _ in range(1000))
    for block in blocks:
        ctypes.memset(block, 1, size)
        libc.free(block)
    before = resident()
    upkeep.due(TRIM_INTERVAL - 0.01)
    assert resident() > before - 4 * MIB
    upkeep.due(TRIM_INTERVAL)

    assert resident() < before - 40 * MIB
    libc.free(last)
    listener.close(0)


LARGE_BLOCKS = """
import ctypes
from sidestep.transport.process import resident, return_large_blocks

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def used(size):
    return ctypes.memset(libc.malloc(ctypes.c_size_t(size)), 1, size)

return_large_blocks()
libc.free(used(24 << 20))
large, above = used(16 << 20), [used(64 << 10) for _ in range(9)]
before = resident()
libc.free(large)
print(before - resident() >> 20)
"""


@pytest.mark.skipif(not hasattr(libc, "malloc_trim"), reason="only glibc has mallopt")
def test_a_large_block_is_returned_when_it_is_freed() -> None:
    """Even below a block in use, after a larger one was freed."""
    done = subprocess.run(
        [sys.executable, "-c", LARGE_BLOCKS], check=True, capture_output=True, text=True
    )

    assert int(done.stdout) >= 15


def test_limits_of_zero_are_off() -> None:
    """A soft limit above the hard one is a configuration error."""
    off = Watchdog(0, 0, lambda: 1 << 60)
    soft = Watchdog(1, 0, lambda: 1 << 60)

    assert (off.must_cut(), off.full) == (False, False)
    assert (soft.must_cut(), soft.full) == (False, True)
    with pytest.raises(ConfigError, match=r"limits\.memory-soft"):
        Watchdog(2, 1, resident)


async def test_new_streams_are_refused_at_the_soft_limit(start: Start) -> None:
    """The refusal is counted; a known stream continues, even over a new connection."""
    async with start() as exporter, connect(exporter) as old, connect(exporter) as new:
        await old.send_hello("old")
        exporter.ingest._watchdog._soft = 1
        await until(lambda: exporter.ingest._watchdog.full)
        await new.send(Hello(VERSION, "new", 2, 1, 1, [EngineInfo("e", "vllm", LABELS)]))
        answer = await new.receive()
        await new.send_hello("old")

        assert isinstance(answer, Nack)
        assert answer.code == "over_limit"
        assert exporter.metrics.value("sidestep_rejected_total", "over_limit") == 1
        assert list(exporter.intake.receiver.streams) == ["old"]


def resident_of(pid: int) -> int:
    """Return the resident memory of a process in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 // MIB


def value(page: str, name: str) -> float:
    """Return the value of a sample; 0 if there is none."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


MORE = {
    "large parts": b"\x03" + struct.pack(">Q", 256 << 10) + bytes(256 << 10),
    "empty parts": b"\x01\x00" * 16384,
}


@contextlib.contextmanager
def endless(path: Path, frame: bytes) -> Iterator[list[int]]:
    """Send parts of a message that never ends, and connect again whenever cut off.

    Yields:
        The bytes sent so far, one number a connection.
    """
    stop = threading.Event()
    sent: list[int] = []

    def attack() -> None:
        while not stop.wait(0.005):
            with contextlib.suppress(OSError), zmtp_peer.connect(path) as peer:
                sent.append(0)
                while not stop.is_set():
                    peer.sendall(frame)
                    sent[-1] += len(frame)

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        yield sent
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("frame", MORE.values(), ids=MORE.keys())
async def test_endless_messages_are_cut_off(frame: bytes, tmp_path: Path) -> None:
    """The process stays within its limits, and counts of an engine stay exact."""
    path, soft, hard = tmp_path / "i.ipc", 200, 220
    arguments = (
        "serve", "--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", f"ipc://{path}",
        "--limits.memory-soft", soft, "--limits.memory-hard", hard,
    )  # fmt: skip
    async with serving(*arguments) as (process, url):
        engine = publisher(f"ipc://{path}")
        engine.push(count())
        await until(lambda: engine.drained)
        peak = pushed = 0
        with endless(path, frame) as sent:
            async with asyncio.timeout(60):
                while len(sent) < 3:
                    engine.push(count())
                    pushed += 1
                    peak = max(peak, resident_of(process.pid))
                    await asyncio.sleep(0.01)
        await until(lambda: engine.drained, timeout=30)
        await asyncio.to_thread(engine.close)
        page = await get(url)
        await until(lambda: resident_of(process.pid) < soft, timeout=30)

    assert value(page, 'sidestep_rebinds_total{reason="memory"}') >= 2
    assert value(page, 'vllm:generation_tokens_total{engine="0",model_name="m"}') == pushed + 1
    assert value(page, "sidestep_lost_items_total") == 0
    # Between two looks a sender on this host can add what it sends in 50 ms, and a slow
    # machine looks late; without the watchdog it would be all that was sent.
    assert peak < 4 * hard
