"""The exporter's socket with hostile, faulty and vanishing senders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exporters import Start, until
from sidestep.app.exporter import Exporter
from sidestep.app.run import serve
from sidestep.config.settings import read
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import VllmStep
from sidestep.errors import RunError
from sidestep.ingest import intake
from sidestep.ingest.intake import Intake
from sidestep.ingest.socket_loop import Ingest
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import MAX_FRAME_BYTES, MAX_ITEM_BYTES, VERSION
from sidestep.protocol.messages import (
    Ack,
    Bye,
    EngineInfo,
    Hello,
    Nack,
    decode_from_sender,
    encode,
)
from socket_peers import Peer, batch, connect, step, tokens

LABELS = {"engine": "0", "model_name": "m"}


def rejected(exporter: Exporter) -> dict[str, float]:
    """Return rejections by reason."""
    ((_, samples),) = exporter.metrics.samples({"sidestep_rejected_total"})
    return {reason: value for (reason,), value in samples}


POISON = {
    "not an item": (b"\xc0", "bad_item"),
    "an unknown kind": (msgspec.msgpack.encode(["zz", 0]), "bad_item"),
    "an engine never named": (encode_item(step(engine=7)), "unknown_engine"),
    "text that is none": (b"\x94\xa2vr\x00\xca\x00\x00\x00\x00\xa2\xff\xfe", "bad_item"),
    "too large": (msgspec.msgpack.encode("x" * MAX_ITEM_BYTES), "too_big"),
}


@pytest.mark.parametrize(("poison", "reason"), POISON.values(), ids=POISON.keys())
async def test_a_bad_item_is_dropped_alone(poison: bytes, reason: str, start: Start) -> None:
    """A bad item is counted by reason and uses up its seq; the items around it are applied."""
    async with start() as exporter, connect(exporter) as peer:
        await peer.send_hello()
        await peer.send(batch(1, step(), poison, step()))
        answer = await peer.receive()

        assert isinstance(answer, Ack)
        assert answer.applied == 3
        assert tokens(exporter) == 2
        assert rejected(exporter) == {reason: 1}


async def test_a_bug_drops_only_its_item(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected error is counted, and logged once with its traceback; the process continues."""
    async with start() as exporter, connect(exporter) as peer:
        await peer.send_hello()
        apply = exporter.ingest.intake.applier.apply

        def broken(engine: Any, item: Any) -> None:
            if item.iteration.num_generation_tokens == 13:
                raise ZeroDivisionError
            apply(engine, item)

        monkeypatch.setattr(exporter.ingest.intake.applier, "apply", broken)
        await peer.send(batch(1, step(tokens=13), step(tokens=13), step()))
        await until(lambda: tokens(exporter) == 1)

        assert rejected(exporter) == {"bug": 2}
        assert len([record for record in caplog.records if record.exc_info]) == 1


async def test_a_bug_drops_only_its_frame(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sender is told, and the frames of others are applied."""

    def broken(frame: Any) -> Any:
        return 1 / 0 if bytes(frame) == b"poison" else decode_from_sender(frame)

    monkeypatch.setattr(intake, "decode_from_sender", broken)
    async with start() as exporter, connect(exporter) as peer, connect(exporter) as other:
        await peer.send_hello()
        await other.send(b"poison")
        refused = await other.receive()
        await peer.send(batch(1, step()))
        await until(lambda: tokens(exporter) == 1)

        assert isinstance(refused, Nack)
        assert rejected(exporter) == {"bug": 1}
        assert len([record for record in caplog.records if record.exc_info]) == 1


async def test_a_bug_outside_of_an_item_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes restarts it; a stalled page might go unnoticed."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    endpoint = f"ipc://{tmp_path}/i.ipc"
    flags = {"web_listen_address": ("127.0.0.1:0",), "ingest_endpoint": (endpoint,)}
    monkeypatch.setattr(Intake, "accept", broken)
    serving = asyncio.create_task(serve(read(flags, {})))
    await until((tmp_path / "i.ipc").exists)
    async with connect(endpoint) as peer:
        await peer.send(b"anything")
        with pytest.raises(RunError, match="ZeroDivisionError"):
            await asyncio.wait_for(serving, 20)


HOSTILE: dict[str, tuple[tuple[bytes, ...], str]] = {
    "an empty frame": ((b"",), "bad_schema"),
    "noise": ((b"\xff\x00 noise",), "bad_schema"),
    "two frames": ((b"a", b"b"), "multipart"),
    "a hundred frames": ((b"",) * 100, "multipart"),
    "nesting": ((b"\x91" * 100_000,), "bad_schema"),
    "over the limit": ((b"\x00" * (MAX_FRAME_BYTES + 100),), "too_big"),
    "a kind that looks like a path": ((msgspec.msgpack.encode(["`$[6][0][99]`"]),), "bad_schema"),
    "another version": ((encode(Hello(99, "x", 1, 1, 1, [])),), "version"),
    "an unknown dialect": (
        (encode(Hello(VERSION, "x", 9, 1, 1, [EngineInfo("e", "abacus", LABELS)])),),
        "unknown_dialect",
    ),
}
CODES = {"version": "version", "unknown_dialect": "over_limit"}
"""Codes of answers to single frames, by reason; a frame that cannot be read is not sent again (S7)."""


@pytest.mark.parametrize(("frames", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
async def test_hostile_frames_are_counted(
    frames: tuple[bytes, ...], reason: str, start: Start
) -> None:
    """By reason, and answered; another peer's stream continues."""
    async with start() as exporter, connect(exporter) as good, connect(exporter) as bad:
        await good.send_hello()
        await bad.send(*frames)
        await until(lambda: rejected_after(exporter) == {reason: 1})
        if len(frames) == 1:
            answer = await bad.receive()
            assert isinstance(answer, Nack)
            assert answer.code == CODES.get(reason, "bad_schema")
        await good.send(batch(1, step()))
        await until(lambda: tokens(exporter) == 1)


def rejected_after(exporter: Exporter) -> dict[str, float]:
    """Send a message and return rejections by reason, once there are some."""
    try:
        return rejected(exporter)
    except ValueError:
        return {}


async def test_a_flood_of_bad_frames_does_not_block_the_loop(start: Start) -> None:
    """Frames without items share the time budget of those with items."""
    async with start() as exporter, connect(exporter) as bad:
        flood = asyncio.create_task(_flood(bad))
        loop = asyncio.get_running_loop()
        waits = []
        while not exporter.metrics.value("sidestep_rejected_total", "throttled") > 3000:
            before = loop.time()
            await asyncio.sleep(0)
            waits.append(loop.time() - before)
        flood.cancel()

    assert len(waits) > 10
    assert sorted(waits)[len(waits) // 2] < 0.05


async def _flood(peer: Peer) -> None:
    while True:
        for _ in range(100):
            await peer.send(b"\xc1")
        await asyncio.sleep(0)


async def test_a_refused_hello_changes_nothing(start: Start) -> None:
    """A restarted stream with an invalid engine: the known stream continues."""
    async with start() as exporter, connect(exporter) as peer:
        await peer.send_hello()
        bad = EngineInfo("e", "abacus", LABELS)
        await peer.send(Bye(1, 0))
        await peer.receive()
        await peer.send(Hello(VERSION, "s", 2, 1, 1, [bad]))
        answer = await peer.receive()
        await peer.send_hello()
        await peer.send(batch(1, step()))
        await until(lambda: tokens(exporter) == 1)

        assert isinstance(answer, Nack)
        assert answer.code == "over_limit"
        assert exporter.registry.engines["s0"].feeds.streams == {1}


async def test_a_large_batch_does_not_block_the_loop(start: Start) -> None:
    """A large batch is applied in slices, so a page is served while thousands of items wait."""
    async with start() as exporter, connect(exporter) as peer:
        await peer.send_hello()
        latencies = [0.001 * n for n in range(200)]
        item = VllmStep(0, 1.0, 1.0, None, IterationStats(1, inter_token_latencies_iter=latencies))
        for number in range(8):
            await peer.send(batch(1 + number * 400, *[item] * 400))
        turns = 0
        while tokens(exporter) < 3200:
            turns += 1
            await asyncio.sleep(0)

        assert turns > 10


class Costly:
    """A source that always has a message, each as costly as that of a hostile publisher.

    Attributes:
        read: Messages so far.
    """

    read = 0

    def open(self, wake: Callable[[], None]) -> None:
        """It is always read."""

    def receive(self, now: float) -> bool:
        """Take the time of a message of 15 MiB."""
        del now
        self.read += 1
        bytes(15 << 20).count(b"x")
        return True

    def tick(self, now: float) -> None:
        """It has no periodic work."""

    def cut(self) -> None:
        """It holds nothing."""

    close = cut

    async def wait_closed(self) -> None:
        """It has no connection."""


async def test_sources_of_large_messages_do_not_keep_engines_waiting(
    start: Start, tmp_path: Path
) -> None:
    """Time is shared, not messages: engines are not served one message for each of a source."""
    source = Costly()
    async with start() as exporter:
        ingest = Ingest(exporter.ingest.intake)
        ingest.open([f"ipc://{tmp_path}/own/i.ipc"], [source])
        async with connect(ingest.endpoints[0]) as peer:
            await peer.send_hello()
            await until(lambda: "s0" in exporter.registry.engines)
            for number in range(300):
                await peer.send(batch(1 + number, step()))
            before = source.read
            await until(lambda: tokens(exporter) == 300)
            read = source.read - before
        ingest.drain()
        drained = source.read
        await ingest.wait_closed()
        ingest.leave()

    assert read < 150
    assert source.read == drained, "the last pages and the snapshot would miss it"
