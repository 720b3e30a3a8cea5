"""State directories of real exporter processes that are killed, stopped and restarted."""

from __future__ import annotations

import asyncio
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter_processes import process
from exporters import MAIN_RUN, Start, until
from pages import get, parse
from replays import replay
from sidestep.engines.vllm.wire import SchedulerStats, VllmStep
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo
from sidestep.snapshot.capture import Capture
from sidestep.snapshot.schedule import Snapshots
from sidestep.snapshot.state_file import DAMAGED, SNAPSHOT, StateDirectory
from sidestep_adapters.publisher.publisher import Publisher

ENGINE = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})
TOKENS = "vllm:generation_tokens"


def value(page: str, family: str) -> float:
    """Return the sum of a family's samples."""
    found = parse(page).get(family)
    return sum(found.samples.values()) if found is not None else 0.0


async def test_counters_survive_an_orderly_restart(start: Start, tmp_path: Path) -> None:
    """The log of the next process says what was restored."""
    async with start(state_dir=str(tmp_path / "state")) as exporter:
        await replay(exporter, MAIN_RUN)
        before = parse(await get(exporter.url))
    async with start(state_dir=str(tmp_path / "state")) as exporter:
        after = parse(await get(exporter.url))

        assert "1 engine" in exporter.durability
        assert exporter.metrics.value("sidestep_recovered_total", "snapshot") == 1
    for name, family in before.items():
        if name.startswith("vllm:") and family.kind in ("counter", "histogram"):
            assert family.samples == after[name].samples, name
    assert "vllm:num_requests_running" not in after


@pytest.mark.parametrize("path", ["", "/pod"])
async def test_page_waits_for_a_snapshot_of_what_it_exposes(
    start: Start, tmp_path: Path, path: str
) -> None:
    """No counter on a page decreases after a crash."""
    state, crashed = tmp_path / "state", tmp_path / "crashed"
    async with start(state_dir=str(state)) as exporter:
        await replay(exporter, MAIN_RUN)
        (engine,) = exporter.registry.engines.values()
        (slot,) = engine.layout.find(f"{TOKENS}_total").slots
        engine.values[slot] = (engine.values[slot] or 0) + 1
        exporter.registry.touch(engine)
        seen = value(await get(exporter.url + path), TOKENS)
        shutil.copytree(state, crashed)
    async with start(state_dir=str(crashed)) as exporter:
        assert value(await get(exporter.url + path), TOKENS) == seen


def item(latency: float = 0.01) -> VllmStep:
    """Return a step of one token."""
    found = IterationStats(1, inter_token_latencies_iter=[latency] * 20)
    return VllmStep(0, 1.0, 1.0, SchedulerStats(num_running_reqs=1), found)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    """Return an engine's publisher."""
    made = Publisher(f"ipc://{tmp_path}/i.ipc", "s", [ENGINE])
    yield made
    made.close(0.1)


async def test_the_exporters_own_counters_do_not_decrease(
    tmp_path: Path, publisher: Publisher
) -> None:
    """Although nothing but heartbeats has come since the last snapshot."""
    publisher.push(item())
    family = "sidestep_messages"
    async with process(tmp_path) as (exporter, url):

        async def has_heartbeats() -> bool:
            return value(await get(url), family) >= 5

        await until(has_heartbeats)
        before = value(await get(url), family)
        publisher.close(0.0)
        exporter.kill()
    async with process(tmp_path) as (exporter, url):
        assert value(await get(url), family) >= before


async def test_nothing_is_lost_or_duplicated_or_decreases(
    tmp_path: Path, publisher: Publisher
) -> None:
    """The exporter is killed right after a scrape, several times, while items arrive."""
    pushed = seen = 0
    for _ in range(5):
        async with process(tmp_path) as (exporter, url):
            for _ in range(20):
                for _ in range(25):
                    publisher.push(item())
                    pushed += 1
                await asyncio.sleep(0.01)
            shown = value(await get(url), TOKENS)
            exporter.kill()
            assert seen <= shown <= pushed
            seen = int(shown)
    async with process(tmp_path) as (_, url):
        await until(lambda: publisher.drained)
        page = await get(url)
        latencies = parse(page)["vllm:inter_token_latency_seconds"].samples
        count = sum(v for (name, _), v in latencies.items() if name.endswith("_count"))

        assert value(page, TOKENS) == pushed
        assert count == 20 * pushed
        assert value(page, "sidestep_lost_items") == 0
    assert publisher.dropped == 0


async def test_snapshots_of_the_exporters_own_counters(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages share one, though heartbeats come all the time; one that failed is written without a page."""
    beats, write = list[int](), StateDirectory.write
    async with start() as exporter:
        snapshots = Snapshots(StateDirectory(tmp_path / "state"), exporter.ingest)

        def beat(*given: Any) -> int:
            beats.append(1)
            exporter.metrics.add("sidestep_messages_total", 1, "heartbeat")
            return write(*given)

        await snapshots.settled()
        exporter.metrics.add("sidestep_messages_total", 1, "heartbeat")
        monkeypatch.setattr(StateDirectory, "write", beat)
        await asyncio.gather(*(snapshots.settled() for _ in range(20)))

        assert len(beats) == 1
        in_the_way = tmp_path / "state" / f"{SNAPSHOT}.new"
        in_the_way.mkdir()
        await snapshots.settled()
        in_the_way.rmdir()
        assert "sidestep_snapshot_healthy 0.0" in await get(exporter.url)
        schedule = asyncio.create_task(snapshots.run())

        async def is_healthy() -> bool:
            return "sidestep_snapshot_healthy 1.0" in await get(exporter.url)

        await until(is_healthy)
        schedule.cancel()


@pytest.mark.parametrize("is_bug", [False, True])
async def test_pages_are_served_while_snapshots_fail(
    is_bug: bool, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The failure and its end are logged, senders hold their frames, and the exporter recovers.

    After a restart a bug would come again: the senders have what it fails at.
    """
    caplog.set_level("INFO", "sidestep.snapshot")
    state = tmp_path / "state"
    state.mkdir()
    async with start(state_dir=str(state)) as exporter:
        publisher = Publisher(exporter.endpoints[0], "s", [ENGINE])
        encode = Capture.encode
        if is_bug:
            monkeypatch.setattr(Capture, "encode", lambda *_: 1 / 0)
        else:
            (state / f"{SNAPSHOT}.new").mkdir()
        publisher.push(item())
        await until(lambda: exporter.intake.items == 1)
        await until(lambda: exporter.metrics.value("sidestep_snapshot_errors_total") > 0)
        page = await get(exporter.url)

        assert "sidestep_snapshot_healthy 0.0" in page
        assert value(page, TOKENS) == 1
        assert publisher.held_bytes > 0
        assert "cannot write the snapshot" in caplog.text
        assert "snapshots can be written again" not in caplog.text
        assert ("a bug in sidestep" in caplog.text) is is_bug
        monkeypatch.setattr(Capture, "encode", encode)
        shutil.rmtree(state / f"{SNAPSHOT}.new", ignore_errors=True)
        await until(lambda: publisher.drained)
        assert "sidestep_snapshot_healthy 1.0" in await get(exporter.url)
        assert caplog.text.count("snapshots can be written again") == 1
        await asyncio.to_thread(publisher.close)


def test_partially_written_snapshot_leaves_the_previous_one(tmp_path: Path) -> None:
    """A full disk accepts a part without an error."""
    directory = StateDirectory(tmp_path)
    directory.write([b"first"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            directory.write([b"x" * 1000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert directory.read() == [b"first"]
    assert [path.name for path in tmp_path.iterdir() if path.name != "lock"] == [SNAPSHOT]
    directory.release()


async def test_damaged_snapshot_is_logged_and_counters_start_at_0(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An older snapshot is not used: items after it would count twice."""
    async with start(state_dir=str(tmp_path / "state")) as exporter:
        await replay(exporter, MAIN_RUN)
    path = tmp_path / "state" / SNAPSHOT
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    async with start(state_dir=str(tmp_path / "state")) as exporter:
        assert "vllm:" not in await get(exporter.url)
        assert exporter.metrics.value("sidestep_recovered_total", "damaged") == 1
    assert "counters start at 0" in caplog.text


@pytest.mark.parametrize("has_file", [True, False])
async def test_a_directory_in_place_of_the_snapshot_is_set_aside(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, has_file: bool
) -> None:
    """The log names where it went, also where a file has the usual name, and snapshots are written again."""
    state = tmp_path / "state"
    (state / SNAPSHOT).mkdir(parents=True)
    (state / SNAPSHOT / "content").touch()
    if has_file:
        (state / DAMAGED).write_text("an earlier one")
    name = f"{DAMAGED}.2" if has_file else DAMAGED
    async with start(state_dir=str(state)) as exporter:
        assert f"was set aside as {name}: all counters start at 0" in caplog.text
        await replay(exporter, MAIN_RUN)
        before = value(await get(exporter.url), TOKENS)
        assert exporter.metrics.value("sidestep_snapshot_errors_total") == 0
    async with start(state_dir=str(state)) as exporter:
        assert value(await get(exporter.url), TOKENS) == before

    assert (state / name / "content").exists()
    assert not has_file or (state / DAMAGED).read_text() == "an earlier one"


async def test_full_ring_folds_without_loss(tmp_path: Path) -> None:
    """No exporter runs meanwhile; the sender's memory stays within the ring."""
    publisher = Publisher(f"ipc://{tmp_path}/i.ipc", "s", [ENGINE])
    held = 0
    for number in range(20_000):
        latencies = [0.001 + number * 1e-7 + n * 1e-6 for n in range(100)]
        found = IterationStats(1, inter_token_latencies_iter=latencies)
        publisher.push(VllmStep(0, 1.0, 1.0, None, found))
        if number % 500 == 499:
            await until(lambda: publisher.queued < 100, timeout=60)
            held = max(held, publisher.held_bytes)
    assert publisher._sender.folded > 1000
    assert held <= 8 << 20
    async with process(tmp_path) as (_, url):
        await until(lambda: publisher.drained, timeout=60)
        page = await get(url)
        latencies_shown = parse(page)["vllm:inter_token_latency_seconds"].samples
        count = sum(v for (name, _), v in latencies_shown.items() if name.endswith("_count"))

        assert value(page, TOKENS) == 20_000
        assert count == 2_000_000
        assert publisher.dropped == 0
    await asyncio.to_thread(publisher.close, 0.1)
