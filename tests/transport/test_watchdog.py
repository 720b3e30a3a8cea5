"""Limits on memory: decided in memory that the test makes, and held in a real process."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from pathlib import Path

import pytest

from command_line import serving, taken_port
from exporters import Start, until
from pages import get
from peers import LABELS, count, endless, publisher
from sidestep.errors import ConfigError
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import EngineInfo, Hello, Nack
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.listener import Listener
from sidestep.transport.process import raise_open_files, resident
from sidestep.transport.upkeep import PAUSE, Upkeep
from sidestep.transport.watchdog import MIB, Watchdog
from socket_peers import connect


class Memory:
    """As much as the test says."""

    def __init__(self) -> None:
        self.used = 0

    def __call__(self) -> int:
        """The reader."""
        return self.used


def test_from_the_soft_limit_nothing_new_and_at_the_hard_one_all_goes() -> None:
    """And back again."""
    memory = Memory()
    watchdog = Watchdog(100, 200, memory)
    seen = []
    for memory.used in (99, 100, 199, 200, 99):
        seen.append((watchdog.must_cut(), watchdog.full))

    assert seen == [(False, False), (False, True), (False, True), (True, True), (False, False)]


def test_memory_of_our_own_is_said_once_and_not_cut_for_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """But more than that still is somebody's; and below the limit all is as before."""
    memory = Memory()
    watchdog = Watchdog(0, 200, memory)
    memory.used = 300
    assert watchdog.must_cut()
    watchdog.cut()
    assert [watchdog.must_cut() for _ in range(100)] == [False] * 100
    assert caplog.text.count("the exporter's own state") == 1

    memory.used = 350
    assert watchdog.must_cut()
    memory.used = 150
    watchdog.cut()
    memory.used = 200
    assert watchdog.must_cut()


def test_cutting_what_does_not_help_is_not_repeated(tmp_path: Path) -> None:
    """The socket is closed once; what it is bound to stays."""
    metrics = SelfMetrics()
    listener = Listener([f"ipc://{tmp_path}/own/i"])
    upkeep = Upkeep(listener, Watchdog(0, 200, lambda: 300), metrics)
    assert upkeep.due(0.0)
    upkeep.act(0.0)
    assert not any(upkeep.due(float(second)) for second in range(100))
    assert metrics.value("sidestep_rebinds_total", "memory") == 1
    listener.close(0)


def test_a_socket_that_is_filled_again_at_once_waits(tmp_path: Path) -> None:
    """Closed meanwhile: what cannot be had costs no memory, and no path."""
    memory = Memory()
    listener = Listener([f"ipc://{tmp_path}/own/i"])
    upkeep = Upkeep(listener, Watchdog(0, 200, memory), SelfMetrics())
    for now in (0.0, 0.1):
        memory.used = 0
        upkeep.due(now)
        memory.used = 200
        assert upkeep.due(now)
        upkeep.act(now)
        assert (listener.socket is None) == (now > 0)
    memory.used = 0
    assert not upkeep.due(PAUSE - 0.01)
    assert not listener.lost
    assert upkeep.due(PAUSE)
    upkeep.act(PAUSE)
    assert listener.socket is not None
    listener.close(0)


def test_limits_that_are_off() -> None:
    """Neither of them, or one."""
    off = Watchdog(0, 0, lambda: 1 << 60)
    soft = Watchdog(1, 0, lambda: 1 << 60)

    assert (off.must_cut(), off.full) == (False, False)
    assert (soft.must_cut(), soft.full) == (False, True)
    with pytest.raises(ConfigError, match=r"limits\.memory-soft"):
        Watchdog(2, 1, resident)


def test_the_readers_read() -> None:
    """A Python process has more than a megabyte, and as many files as it may have."""
    assert MIB < resident() < 100_000 * MIB
    assert raise_open_files() >= 256


async def test_no_new_stream_at_the_soft_limit(start: Start) -> None:
    """It is told so, and counted; one that is known goes on, also over a new connection."""
    async with start() as exporter, connect(exporter) as old, connect(exporter) as new:
        await old.greet("old")
        exporter.ingest._watchdog._soft = 1
        await until(lambda: exporter.ingest._watchdog.full)
        await new.say(Hello(VERSION, "new", 2, 1, 1, [EngineInfo("e", "vllm", LABELS)]))
        answer = await new.hear()
        await new.greet("old")

        assert isinstance(answer, Nack)
        assert answer.code == "over_limit"
        assert exporter.metrics.value("sidestep_rejected_total", "over_limit") == 1
        assert list(exporter.intake.receiver.streams) == ["old"]


def resident_of(pid: int) -> int:
    """MiB, as seen from outside."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 // MIB


def value(page: str, name: str) -> float:
    """A sample's value; 0 where there is none."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


MORE = {
    "large parts": b"\x03" + struct.pack(">Q", 256 << 10) + bytes(256 << 10),
    "empty parts": b"\x01\x00" * 16384,
}


@pytest.mark.parametrize("frame", MORE.values(), ids=MORE.keys())
async def test_endless_messages_cost_their_sender_the_connection(
    frame: bytes, tmp_path: Path
) -> None:
    """The process lives within its limits, and what an engine counts meanwhile is exact."""
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
                while len(sent) < 4:
                    engine.push(count())
                    pushed += 1
                    peak = max(peak, resident_of(process.pid))
                    await asyncio.sleep(0.01)
        await until(lambda: engine.drained, timeout=30)
        await asyncio.to_thread(engine.close)
        page = await get(url)
        await until(lambda: resident_of(process.pid) < soft, timeout=30)

    assert value(page, 'sidestep_rebinds_total{reason="memory"}') >= 3
    assert value(page, 'vllm:generation_tokens_total{engine="0",model_name="m"}') == pushed + 1
    assert value(page, "sidestep_lost_items_total") == 0
    # Between two looks a sender on this host can add what it sends in 50 ms, and a slow
    # machine looks late; without the watchdog it would be all that was sent.
    assert peak < 4 * hard


async def test_hundreds_of_half_open_connections_pass() -> None:
    """They cost a descriptor each until their handshake is overdue; engines are heard meanwhile."""
    held, port = taken_port()
    held.close()
    endpoint = f"tcp://127.0.0.1:{port}"
    arguments = ("serve", "--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", endpoint)
    async with serving(*arguments) as (process, _):
        before = descriptors(process.pid)
        with contextlib.ExitStack() as silent:
            for _ in range(400):
                silent.enter_context(socket.create_connection(("127.0.0.1", port)))
            await until(lambda: descriptors(process.pid) > before + 100)
            engine = publisher(endpoint)
            engine.push(count())
            await until(lambda: engine.connected and engine.drained)
            await until(lambda: descriptors(process.pid) < before + 20, timeout=30)
            await asyncio.to_thread(engine.close)


def descriptors(pid: int) -> int:
    """Open files of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
