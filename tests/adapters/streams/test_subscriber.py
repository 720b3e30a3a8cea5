"""Subscriptions over real sockets: a publisher that restarts, skips, repeats and sends garbage."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import pytest
from fuzz.hostile_exporter import hostile_exporter
from fuzz.hostile_publisher import gaps_without_end, parts_without_end, restarts_without_end

from exporters import Start, until
from publishers import Publisher
from recorded import read
from rendered import render
from sidestep.app.exporter import Exporter
from sidestep.telemetry import peer_log
from sidestep.transport.process import resident, trim
from sidestep_adapters.streams import subscriber
from sidestep_adapters.streams.frames import MAX_BYTES

RESIDENT = "sidestep_kv_cache_resident_blocks"
STORED = "sidestep_kv_cache_stored_blocks_total"
REMOVED = "sidestep_kv_cache_removed_blocks_total"
FLOOD = 256 << 20
LIVES = "sidestep_kv_cached_block_lifetime_seconds_count"


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    """Return a publisher with a replay socket."""
    with Publisher(f"ipc://{tmp_path}/kv", f"ipc://{tmp_path}/replay") as made:
        yield made


def spec(publisher: Publisher, **more: str) -> str:
    """Return the subscription to ``publisher``."""
    options = {"replay": publisher.replay, **more}
    given = "".join(f",{name}={text}" for name, text in options.items() if text)
    return f"kv-events={publisher.endpoint}{given}"


@asynccontextmanager
async def subscribed(start: Start, publisher: Publisher, **more: str) -> AsyncIterator[Exporter]:
    """Run an exporter that is connected to ``publisher``."""
    async with start(subscribe=(spec(publisher, **more),), kv_sample_rate="1") as exporter:
        await until(lambda: publisher.subscribed)
        yield exporter


def message(stamp: float, *events: tuple[str, list[int]]) -> bytes:
    """Return a message of KV events of one medium."""
    made = [{"type": f"Block{kind}", "block_hashes": hashes} for kind, hashes in events]
    return msgspec.msgpack.encode([stamp, made, 0])


def stored(*hashes: int, stamp: float = 1.0) -> bytes:
    """Return a message of one event."""
    return message(stamp, ("Stored", list(hashes)))


def samples(exporter: Exporter, name: str) -> dict[str, float]:
    """Return samples of the page."""
    found = (line.rpartition(" ") for line in render(exporter.registry).decode().splitlines())
    return {key: float(value) for key, _, value in found if key.startswith(f"{name}{{")}


def sample(exporter: Exporter, name: str) -> float:
    """Return the only sample, or 0."""
    return sum(samples(exporter, name).values())


def counted(exporter: Exporter, name: str, publisher: Publisher) -> float:
    """Return a counter of a subscription."""
    label = f"kv-events {publisher.endpoint}"
    return exporter.metrics.value(f"sidestep_subscription_{name}_total", label)


def rejected(exporter: Exporter, reason: str) -> float:
    """Return the number of rejected messages."""
    return exporter.metrics.value("sidestep_rejected_total", reason)


def cache_history(seed: int, count: int = 600) -> list[bytes]:
    """Return messages of a cache in which blocks are stored, hit and removed."""
    random = Random(seed)
    there: list[int] = []
    made = []
    for number in range(count):
        new = [random.getrandbits(64) for _ in range(random.randint(1, 4))]
        again = random.sample(there, min(len(there), random.randint(0, 2)))
        gone = [there.pop(random.randrange(len(there))) for _ in range(min(len(there), 2))]
        made.append(
            message(1000.0 + number / 8, ("Stored", new), ("Stored", again), ("Removed", gone))
        )
        there += new
    return made


async def test_replays_make_up_for_losses(start: Start, tmp_path: Path) -> None:
    """One in a hundred messages is dropped and replayed: the page is the same."""
    random = Random(1)
    streams = [f"ipc://{tmp_path}/{name}" for name in ("whole", "holes")]
    publishers = [Publisher(stream, f"{stream}-replay") for stream in streams]
    given = [spec(each, **{"label.way": each.endpoint[-5:]}) for each in publishers]
    messages = cache_history(2, 1500)
    with publishers[0] as whole, publishers[1] as holes:
        async with start(subscribe=tuple(given), kv_sample_rate="1") as exporter:
            await until(lambda: whole.subscribed)
            await until(lambda: holes.subscribed)
            for number, one in enumerate(messages):
                whole.publish(one)
                last = number == len(messages) - 1
                holes.publish(one, copies=int(last or random.random() >= 0.01))
                if number % 50 == 0:
                    await until(lambda number=number: sample(exporter, STORED) > number)  # type: ignore[misc]
            await until(lambda: counted(exporter, "messages", whole) == len(messages))
            await until(lambda: counted(exporter, "messages", holes) == len(messages))
            pages = [
                {line for line in page if f'way="{way}"' in line}
                for page in [render(exporter.registry).decode().splitlines()]
                for way in ("whole", "holes")
            ]
            dropped = counted(exporter, "replayed_messages", holes)
            lost = counted(exporter, "lost_messages", holes)

    assert dropped > 5
    assert lost == 0
    assert {line.replace("whole", "holes") for line in pages[0]} == pages[1]
    assert any(line.startswith(LIVES) for line in pages[0])


@pytest.mark.parametrize("kept", [10_000, 10])
async def test_a_late_start_gets_retained_messages(
    start: Start, publisher: Publisher, kept: int
) -> None:
    """They arrive before any live message; after dropped ones, resident blocks are unknown."""
    publisher.kept = kept
    for number in range(30):
        publisher.publish(stored(number))
    retained = min(kept, 30)
    async with start(subscribe=(spec(publisher),)) as exporter:
        await until(lambda: sample(exporter, STORED) == retained)

        assert list(samples(exporter, RESIDENT).values()) == ([30] if retained == 30 else [])
        assert counted(exporter, "replayed_messages", publisher) == retained
        assert counted(exporter, "lost_messages", publisher) == 0
        assert publisher.asked[0] == 0


async def test_a_publisher_restarts(start: Start, publisher: Publisher) -> None:
    """Its numbers and its cache start again; missed messages are replayed."""
    async with subscribed(start, publisher) as exporter:
        for number in range(5):
            publisher.publish(stored(number))
        await until(lambda: sample(exporter, RESIDENT) == 5)
        publisher.restart()
        for number in range(3):
            publisher.publish(stored(number, stamp=5.0))
        await until(lambda: sample(exporter, STORED) == 8)
        await until(lambda: sample(exporter, RESIDENT) == 3)

        assert counted(exporter, "restarts", publisher) == 1
        assert counted(exporter, "lost_messages", publisher) == 0
        await until(lambda: sample(exporter, "sidestep_kv_cached_abandoned_blocks_total") == 5)
        (engine,) = exporter.registry.engines.values()
        assert engine.restarts == 1


INVALID: list[tuple[str, list[bytes], str]] = [
    ("one frame", [b"kv"], "bad_frame"),
    ("a long number", [b"kv", bytes(9), b""], "bad_frame"),
    ("a number beyond all", [b"kv", b"\xff" * 8, b""], "bad_frame"),
    ("many frames", [b"kv", *[b""] * 5000], "bad_frame"),
    ("no events", [b"kv", (1).to_bytes(8, "big"), b"\xc1"], "bad_message"),
    ("too large", [b"kv", (1).to_bytes(8, "big"), bytes(2 << 20)], "too_big"),
    ("no hashes", [b"kv", (1).to_bytes(8, "big"), message(1.0, ("Stored", [None]))], "bad_event"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(
    ("frames", "reason"), [case[1:] for case in INVALID], ids=[case[0] for case in INVALID]
)
async def test_an_invalid_message_is_counted_and_dropped(
    start: Start,
    publisher: Publisher,
    frames: list[bytes],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The stream continues, and a line names it."""
    async with subscribed(start, publisher, replay="") as exporter:
        publisher.publish(stored(1))
        publisher.send(*frames)
        await until(lambda: rejected(exporter, reason) == 1)
        publisher.publish(stored(2), seq=2)
        await until(lambda: sample(exporter, STORED) == 2)

        assert rejected(exporter, "bug") == 0
    (line,) = (text for text in caplog.messages if reason in text)
    assert f" of kv-events {publisher.endpoint}: " in line


async def test_an_oversized_frame_ends_the_connection(
    start: Start, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher is reconnected after a while."""
    monkeypatch.setattr(subscriber, "RECONNECT_AFTER", 0.2)
    async with subscribed(start, publisher, replay="") as exporter:
        publisher.publish(stored(1))
        await until(lambda: sample(exporter, STORED) == 1)
        publisher.send(b"kv", bytes(8), bytes(MAX_BYTES + 1))
        await until(lambda: publisher.subscribed)
        publisher.publish(stored(2))
        await until(lambda: sample(exporter, STORED) == 2)


async def test_waiting_messages_are_discarded_when_memory_is_short(
    start: Start, publisher: Publisher
) -> None:
    """Missing messages are replayed afterwards."""
    async with subscribed(start, publisher) as exporter:
        publisher.publish(stored(1))
        await until(lambda: sample(exporter, STORED) == 1)
        publisher.publish(stored(2), copies=0)
        exporter.ingest._sources.cut()
        await until(lambda: sample(exporter, STORED) == 2)

        assert counted(exporter, "lost_messages", publisher) == 0


@pytest.mark.parametrize("kept", [10_000, 3])
async def test_an_exporter_resumes_where_it_stopped(
    start: Start, publisher: Publisher, tmp_path: Path, kept: int
) -> None:
    """Missed messages are replayed and count once; the others are counted as lost."""
    flags = {"subscribe": (spec(publisher),), "state_dir": str(tmp_path / "state")}
    async with start(**flags) as exporter:
        await until(lambda: publisher.subscribed)
        for number in range(5):
            publisher.publish(stored(number))
        await until(lambda: sample(exporter, STORED) == 5)
    for number in range(5, 15):
        publisher.publish(stored(number))
    publisher.kept = kept
    async with start(**flags) as exporter:
        await until(lambda: sample(exporter, STORED) == 5 + min(kept, 10))
        publisher.publish(stored(15))
        await until(lambda: sample(exporter, STORED) == 6 + min(kept, 10))

        assert counted(exporter, "lost_messages", publisher) == max(10 - kept, 0)
        assert len(samples(exporter, RESIDENT)) == int(kept > 10)


async def test_nothing_is_applied_while_a_snapshot_is_made(
    start: Start, publisher: Publisher
) -> None:
    """Messages wait, and count afterwards."""
    async with subscribed(start, publisher) as exporter:
        publisher.publish(stored(1))
        await until(lambda: sample(exporter, STORED) == 1)
        async with exporter.ingest.held():
            for number in range(2, 9):
                publisher.publish(stored(number))
            ticks = exporter.ingest.lag._recent
            seen = len(ticks)
            await until(lambda: len(exporter.ingest.lag._recent) >= min(seen + 4, 18))
            assert sample(exporter, STORED) == 1
        await until(lambda: sample(exporter, STORED) == 8)


async def test_ranks_by_ports(start: Start, tmp_path: Path) -> None:
    """Each port is a subscription; a rank in the message takes precedence."""
    base = f"ipc://{tmp_path}/kv."
    with Publisher(f"{base}0") as first, Publisher(f"{base}1") as second:
        async with start(subscribe=(f"kv-events={base}0-1,model=m",)) as exporter:
            await until(lambda: first.subscribed)
            await until(lambda: second.subscribed)
            first.publish(msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, []]]]))
            second.publish(msgspec.msgpack.encode([1.0, [["BlockStored", [1, 2], None, []]]]))
            await until(lambda: sample(exporter, STORED) == 3)

            assert samples(exporter, STORED) == {
                f'{STORED}{{engine="0",medium="GPU",model_name="m"}}': 1,
                f'{STORED}{{engine="1",medium="GPU",model_name="m"}}': 2,
            }


async def test_the_recorded_streams_side_by_side(start: Start, tmp_path: Path) -> None:
    """All three streams of one engine are replayed as captured."""
    names = {"kv-events": "kv_events", "forward-pass": "forward_pass", "load": "load_stat"}
    made = {kind: Publisher(f"ipc://{tmp_path}/{kind}") for kind in names}
    given = tuple(f"{kind}={each.endpoint},model=tiny" for kind, each in made.items())
    async with start(subscribe=given) as exporter:

        def taken(kind: str) -> float:
            label = f"{kind} {made[kind].endpoint}"
            return exporter.metrics.value("sidestep_subscription_messages_total", label)

        for kind, each in made.items():
            with each:
                await until(partial(getattr, each, "subscribed"))
                recorded = list(read(f"sglang_{names[kind]}"))
                for one in recorded:
                    each.send(*one.frames)
                wanted = len(recorded)
                await until(lambda kind=kind, wanted=wanted: taken(kind) == wanted)  # type: ignore[misc]

        assert len(exporter.registry.engines) == 1
        assert sample(exporter, STORED) == 5438
        assert sample(exporter, REMOVED) == 1367
        assert sample(exporter, "sidestep_forward_pass_tokens_total") == 3098 + 2340
        assert sample(exporter, "sidestep_load_prefill_uncached_tokens_total") == 3098
        assert not exporter.metrics._values["sidestep_rejected_total"]


async def test_lines_name_the_publisher_and_why_it_is_absent(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it starts, and when it does."""
    monkeypatch.setattr(peer_log, "PATIENCE", 0.5)
    caplog.set_level("INFO", subscriber.log.name)
    endpoint = f"ipc://{tmp_path}/kv"
    async with start(subscribe=(f"kv-events={endpoint}",)):
        await until(lambda: bool(caplog.messages))
        with Publisher(endpoint, ""):
            await until(lambda: len(caplog.messages) == 2)
    absent, connected = caplog.messages

    assert absent.startswith(
        f"kv-events {endpoint}: no connection to the publisher for 1 s: No such"
    )
    assert connected.startswith(f"kv-events {endpoint}: connected to the publisher, after ")


async def test_a_publisher_cannot_fill_the_log(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of its messages looks like that of another process, or follows a gap."""
    caplog.set_level("INFO")
    for behaviour in (restarts_without_end, gaps_without_end):
        with hostile_exporter(("127.0.0.1", 0), behaviour) as hostile:
            one = f"kv-events={hostile.endpoint}"
            async with start(subscribe=(one,)) as exporter:
                name = "restarts" if behaviour is restarts_without_end else "lost_messages"
                family = f"sidestep_subscription_{name}_total"
                label = one.replace("=", " ")
                await until(lambda: exporter.metrics.value(family, label) > 100)  # noqa: B023
    lines = Counter(record.msg for record in caplog.records)

    assert lines["%s: the publisher has restarted"] == 1
    assert max(lines.values()) <= 2


async def test_a_cut_frees_what_waits_before_it_returns(start: Start) -> None:
    """The watchdog would take it for the exporter's own state, and raise its limit."""
    with hostile_exporter(("127.0.0.1", 0), parts_without_end) as hostile:
        endpoint = f"kv-events={hostile.endpoint}"
        async with start(subscribe=(endpoint, endpoint.replace("127.0.0.1", "localhost"))) as one:
            before = resident()
            await until(lambda: resident() > before + FLOOD)
            one.ingest._sources.cut()
            trim()
            assert resident() < before + FLOOD // 2
            await until(lambda: hostile.connections > 2)
