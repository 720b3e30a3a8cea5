"""Streams from messages to series on the page, without sockets."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intakes import Fed
from recorded import read
from sidestep.config.subscriptions import parse
from sidestep.ingest.local_stream import RankFeed
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.streams.readers import READERS
from sidestep_adapters.streams.sequence import Discontinuity

WHOLE = Discontinuity(0, restarted=False, from_start=True)
LATE = Discontinuity(0, restarted=False, from_start=False)
LOST = Discontinuity(3, restarted=False, from_start=False)
LIFETIMES = "sidestep_kv_cached_block_lifetime_seconds"
SHORTAGE = "sidestep_kv_cached_shortage_blocks"
RESIDENT = "sidestep_kv_cache_resident_blocks"
ABANDONED = "sidestep_kv_cached_abandoned_blocks_total"


class Stream:
    """One subscription's reader and feed, into an intake of its own or a shared one."""

    def __init__(self, text: str = "kv-events=tcp://h:1", fed: Fed | None = None) -> None:
        self.fed = fed or Fed(rate=1.0)
        (subscription,) = parse(text)
        reader = READERS[subscription.kind]
        self.feed = RankFeed(self.fed.intake, subscription, reader.feature)
        self.reader = reader(self.feed)

    def take(self, *payloads: object) -> None:
        """Apply messages."""
        for payload in payloads:
            raw = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
            self.feed.mark_seen(self.fed.now)
            self.feed.enqueue(partial(self.reader.accept, raw, self.fed.now))
            self.work()

    def broke(self, found: Discontinuity) -> None:
        """Apply a discontinuity."""
        self.feed.enqueue(lambda: self.reader.on_discontinuity(found))
        self.work()

    def work(self) -> None:
        """Run all queued work."""
        while self.fed.intake.busy:
            self.fed.intake.work()

    def samples(self, name: str) -> dict[str, float]:
        """Return the samples of ``name`` on the page, by their labels."""
        found = (line.rpartition(" ") for line in self.fed.page.splitlines())
        return {
            key.removeprefix(name): float(value)
            for key, _, value in found
            if key.startswith(f"{name}{{")
        }

    def sample(self, name: str) -> float:
        """Return the only sample."""
        (value,) = self.samples(name).values()
        return value


def replayed(kind: str, recording: str) -> Stream:
    """Return a stream that has read a whole recording."""
    stream = Stream(f"{kind}=tcp://h:1")
    stream.broke(WHOLE)
    stream.take(*(message.encoded for message in read(recording)))
    return stream


def batch(stamp: float, *events: object, rank: int = 0) -> list[object]:
    """Return a message of KV events."""
    return [stamp, list(events), rank]


def stored(*hashes: int, **more: object) -> dict[str, object]:
    """Return an event that stored these hashes."""
    return {"type": "BlockStored", "block_hashes": list(hashes), **more}


def removed(*hashes: int, **more: object) -> dict[str, object]:
    """Return an event that removed these hashes."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **more}


def lifetimes(stream: Stream, medium: str = "GPU") -> float:
    """Return the number of ended block lifetimes."""
    samples = stream.samples(f"{LIFETIMES}_count")
    return sum(count for labels, count in samples.items() if f'medium="{medium}"' in labels)


def test_lifetimes_and_blocks_have_families_by_medium() -> None:
    """All blocks are counted; lifetimes are those of sampled blocks."""
    stream = Stream("kv-events=tcp://h:1,model=m,label.pod=p")
    stream.broke(WHOLE)
    stream.take(
        batch(1.0, stored(1, 2, 3), stored(9, medium="DISK")),
        batch(4.0, removed(1), stored(2)),
        batch(6.0, removed(2), stored(2, medium="DISK")),
    )

    labels = '{engine="0",medium="GPU",model_name="m",pod="p"}'
    assert stream.samples("sidestep_kv_cache_stored_blocks_total")[labels] == 4
    assert stream.samples("sidestep_kv_cache_removed_blocks_total") == {labels: 2}
    assert stream.samples(RESIDENT) == {labels: 1, labels.replace("GPU", "DISK"): 2}
    assert stream.samples(f"{LIFETIMES}_sum") == {labels: 8.0}
    assert stream.samples("sidestep_kv_cached_block_idle_seconds_sum") == {labels: 5.0}
    assert stream.sample("sidestep_kv_cached_tracked_blocks") == 3
    assert stream.sample("sidestep_kv_cached_sample_ratio") == 1.0
    assert stream.fed.rejected == {}


def test_a_page_has_how_much_too_small_the_cache_was() -> None:
    """A store that follows a removal is observed by the blocks that were removed since."""
    stream = Stream()
    stream.broke(WHOLE)
    stream.take(batch(1.0, stored(*range(500))), batch(2.0, removed(*range(150))))
    assert stream.sample("sidestep_kv_cached_stores_total") == 500
    stream.take(batch(5.0, stored(149, 0)), batch(6.0, removed(200), stored(700, 1)))

    assert stream.sample("sidestep_kv_cached_stores_total") == 504
    assert stream.sample(f"{SHORTAGE}_count") == 3
    assert stream.sample(f"{SHORTAGE}_sum") == 0 + 148 + 148
    buckets = stream.samples(f"{SHORTAGE}_bucket")
    assert [count for labels, count in buckets.items() if 'le="100.0"' in labels] == [1]
    assert stream.sample("sidestep_kv_cached_absence_seconds_sum") == 3 + 3 + 4
    assert stream.fed.rejected == {}


def test_a_loss_discards_block_lifetimes() -> None:
    """The cache's content is unknown until it is cleared or its publisher restarts."""
    stream = Stream()
    stream.broke(WHOLE)
    stream.take(batch(1.0, stored(1, 2, 3)))
    stream.broke(LOST)

    assert stream.samples(RESIDENT) == {}
    assert stream.sample(ABANDONED) == 3
    stream.take(batch(2.0, removed(1), stored(7)))
    assert lifetimes(stream) == 0
    assert stream.samples(RESIDENT) == {}
    stream.broke(WHOLE)
    assert stream.sample(RESIDENT) == 0
    assert stream.sample(ABANDONED) == 4


def resident(stream: Stream) -> dict[str, float]:
    """Return the resident blocks by medium."""
    found = stream.samples(RESIDENT).items()
    return {labels.split('medium="')[1].split('"')[0]: count for labels, count in found}


@pytest.mark.parametrize("is_whole", [True, False])
def test_blocks_that_were_freed_silently_count_once(is_whole: bool) -> None:
    """They are stored again; where the sample is not complete, only what is impossible is corrected."""
    stream = Stream()
    stream.broke(WHOLE)
    if not is_whole:
        stream.fed.intake.registry.tracking.sampling.capacity = 100
    stream.take(batch(1.0, stored(*range(500))), batch(60.0, stored(*range(500))))
    assert resident(stream) == {"GPU": 500 if is_whole else 1000}
    stream.take(batch(61.0, removed(*range(500)), removed(*range(500)), removed(*range(500))))
    assert resident(stream) == {"GPU": 0}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["stored", "stored", "removed", "clear"]),
            st.sampled_from(["GPU", "CPU"]),
            st.lists(st.integers(0, 20), min_size=1, max_size=8, unique=True),
        ),
        max_size=40,
    )
)
def test_resident_blocks_are_those_of_a_set(steps: list[tuple[str, str, list[int]]]) -> None:
    """Whatever events are missing: each hash counts from its last store to its removal."""
    known = dict[str, set[int]](GPU=set(), CPU=set())
    events: list[dict[str, object]] = []
    for kind, medium, hashes in steps:
        if kind == "clear":
            events.append({"type": "AllBlocksCleared", "medium": medium})
            known[medium].clear()
        elif kind == "stored":
            events.append(stored(*hashes, medium=medium))
            known[medium] |= {*hashes}
        else:
            events.append(removed(*hashes, medium=medium))
            known[medium] -= {*hashes}
    for messages in ([batch(1.0, *events)], [batch(1.0, event) for event in events]):
        stream = Stream()
        stream.broke(WHOLE)
        stream.take(*messages)
        found = resident(stream)
        assert all(found.get(medium, 0) == len(hashes) for medium, hashes in known.items())


def test_an_invalid_message_is_a_loss() -> None:
    """Its changes are missing; an unknown kind of event is no loss."""
    stream = Stream()
    stream.broke(WHOLE)
    stream.take(batch(1.0, stored(1)), batch(1.0, {"type": "BlockPinned"}))
    assert stream.sample(RESIDENT) == 1

    stream.take(batch(1.0, stored(2), {"type": "BlockStored"}))
    assert stream.samples(RESIDENT) == {}
    stream.take(batch(1.0, {"type": "AllBlocksCleared"}), b"\xc1")
    assert stream.samples(RESIDENT) == {}
    assert stream.fed.rejected == {
        ("unknown_event",): 1, ("bad_event",): 1, ("bad_message",): 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("option", "rank", "label"), [(",engine=seven", 3, "seven"), ("", 3, "3"), ("", None, "0")]
)
def test_an_engine_is_named_by_the_option_the_message_or_its_place(
    option: str, rank: int | None, label: str
) -> None:
    """The first of these that is given counts."""
    stream = Stream(f"kv-events=tcp://h:1{option}")
    stream.take([1.0, [stored(1)], rank])

    (labels,) = stream.samples("sidestep_kv_cache_stored_blocks_total")
    assert f'engine="{label}"' in labels


def test_two_publishers_are_not_mixed(caplog: pytest.LogCaptureFixture) -> None:
    """The second publisher of one kind for one engine is rejected; the log names it, not an engine's stream."""
    one = Stream("kv-events=tcp://h:1")
    other = Stream("kv-events=tcp://other:1", one.fed)
    one.broke(WHOLE)
    one.take(batch(1.0, stored(1)))
    one.fed.send_hello("engine", [EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})])
    other.take(batch(1.0, stored(5, 6)))

    assert f"an item of {other.feed.name}: engine_conflict" in caplog.text
    assert one.sample(RESIDENT) == 1
    assert one.fed.rejected == {("engine_conflict",): 1}


def test_sglangs_page_and_its_events_agree() -> None:
    """4084 tokens are in blocks of one; events before the recording are added."""
    messages = [message.payload for message in read("sglang_kv_events")]
    stream = Stream()
    stream.broke(WHOLE)
    known: set[int] = set()
    missed: list[int] = []
    for _, events, _ in messages:
        for event in events:
            hashes = event.get("block_hashes", [])
            if event["type"] == "BlockStored":
                known.update(hashes)
            else:
                missed += [one for one in hashes if one not in known]
                known.difference_update(hashes)
    stream.take(batch(1.0, stored(*missed)), *messages[:-1])

    assert len(missed) == 13
    assert stream.sample(RESIDENT) == 4084
    stream.take(messages[-1])
    assert stream.sample(RESIDENT) == 0


def test_both_engines_have_the_same_families() -> None:
    """Blocks are removed in both recordings: 355 of vLLM's 432."""
    vllm, sglang = streams = [
        replayed("kv-events", f"{name}_kv_events") for name in ("vllm", "sglang")
    ]
    names = [
        {line.split("{")[0] for line in stream.fed.page.splitlines() if not line.startswith("#")}
        for stream in streams
    ]

    assert names[0] == names[1]
    assert f"{LIFETIMES}_bucket" in names[0]
    assert lifetimes(vllm) == 355
    assert vllm.sample(RESIDENT) == 432 - 355
    assert (vllm.fed.rejected, sglang.fed.rejected) == ({}, {})
