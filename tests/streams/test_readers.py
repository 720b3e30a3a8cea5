"""What streams come to on the page, from messages on, without sockets."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import msgspec
import pytest

from intakes import Fed
from recorded import read
from sidestep.config.subscriptions import parse
from sidestep.ingest.local_stream import MAX_FED, RankFeed
from sidestep.metrics.registry import ENGINE_EXPIRES_SECONDS, GAUGES_EXPIRE_SECONDS
from sidestep.protocol.block_events import MAX_CHANGES
from sidestep.protocol.messages import EngineInfo
from sidestep.snapshot.capture import Capture, restore
from sidestep_adapters.streams.readers import READERS
from sidestep_adapters.streams.sequence import Break

WHOLE = Break(0, restarted=False, whole=True)
LATE = Break(0, restarted=False, whole=False)
LOST = Break(3, restarted=False, whole=False)
LIFETIMES = "sidestep_kv_cached_block_lifetime_seconds"
RESIDENT = "sidestep_kv_cache_resident_blocks"
ABANDONED = "sidestep_kv_cached_abandoned_blocks_total"


class Stream:
    """One subscription's reader and feed, into an intake of its own or another's."""

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
            self.feed.heard(self.fed.now)
            self.fed.intake.enqueue(partial(self.reader.take, raw, self.fed.now))
            self.work()

    def broke(self, found: Break) -> None:
        """Break the stream."""
        self.fed.intake.enqueue(lambda: self.reader.broke(found))
        self.work()

    def work(self) -> None:
        """Do all there is to do."""
        while self.fed.intake.busy:
            self.fed.intake.work()

    def samples(self, name: str) -> dict[str, float]:
        """Samples of ``name`` on the page, by their labels."""
        found = (line.rpartition(" ") for line in self.fed.page.splitlines())
        return {
            key.removeprefix(name): float(value)
            for key, _, value in found
            if key.startswith(f"{name}{{")
        }

    def sample(self, name: str) -> float:
        """The only one."""
        (value,) = self.samples(name).values()
        return value


def batch(stamp: float, *events: object, rank: int = 0) -> list[object]:
    """A message of KV events."""
    return [stamp, list(events), rank]


def stored(*hashes: int, **more: object) -> dict[str, object]:
    """An event."""
    return {"type": "BlockStored", "block_hashes": list(hashes), **more}


def removed(*hashes: int, **more: object) -> dict[str, object]:
    """An event."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **more}


def lives(stream: Stream, medium: str = "GPU") -> float:
    """How many ended."""
    samples = stream.samples(f"{LIFETIMES}_count")
    return sum(count for labels, count in samples.items() if f'medium="{medium}"' in labels)


def test_lives_and_blocks_have_families_by_medium() -> None:
    """Blocks are all counted, lives are of those sampled."""
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
    assert stream.samples(RESIDENT) == {labels: 2, labels.replace("GPU", "DISK"): 2}
    assert stream.samples(f"{LIFETIMES}_sum") == {labels: 8.0}
    assert stream.samples("sidestep_kv_cached_block_idle_seconds_sum") == {labels: 5.0}
    assert stream.sample("sidestep_kv_cached_tracked_blocks") == 3
    assert stream.sample("sidestep_kv_cached_sample_ratio") == 1.0
    assert stream.fed.rejected == {}


def test_a_cleared_cache_holds_nothing() -> None:
    """Whatever was in it; its lives are not told of, since they did not end by themselves."""
    stream = Stream()
    stream.broke(LATE)
    stream.take(batch(1.0, stored(1, 2)))
    assert stream.samples(RESIDENT) == {}

    stream.take(batch(2.0, {"type": "AllBlocksCleared"}, stored(5)))
    assert stream.sample(RESIDENT) == 1
    assert stream.sample("sidestep_kv_cache_clears_total") == 1
    stream.take(batch(3.0, {"type": "AllBlocksCleared", "medium": "DISK"}))
    assert list(stream.samples(RESIDENT).values()) == [1, 0]
    assert lives(stream) == 0


def test_what_is_lost_ends_lives_unseen() -> None:
    """Nobody knows what is in the cache until it is cleared, or its publisher begins anew."""
    stream = Stream()
    stream.broke(WHOLE)
    stream.take(batch(1.0, stored(1, 2, 3)))
    stream.broke(LOST)

    assert stream.samples(RESIDENT) == {}
    assert stream.sample(ABANDONED) == 3
    stream.take(batch(2.0, removed(1), stored(7)))
    assert lives(stream) == 0
    assert stream.samples(RESIDENT) == {}
    stream.broke(WHOLE)
    assert stream.sample(RESIDENT) == 0
    assert stream.sample(ABANDONED) == 4


def test_what_contradicts_itself_is_not_shown() -> None:
    """More blocks removed than there were."""
    stream = Stream()
    stream.broke(WHOLE)
    stream.take(batch(1.0, stored(1)), batch(2.0, removed(1, 2)))

    assert stream.samples(RESIDENT) == {}
    assert stream.sample("sidestep_kv_cache_removed_blocks_total") == 2


def test_a_message_that_cannot_be_is_a_loss() -> None:
    """What it would have told is missing; a kind of event that is not known is none."""
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


def test_a_long_message_is_applied_in_parts() -> None:
    """Each of them short, and all of them there."""
    stream = Stream()
    stream.broke(WHOLE)
    events = [stored(*range(begin, begin + 10_000)) for begin in range(0, 50_000, 10_000)]
    events += [removed(one) for one in range(2 * MAX_CHANGES)]
    raw = msgspec.msgpack.encode(batch(1.0, *events))
    stream.feed.heard(0.0)
    stream.fed.intake.enqueue(lambda: stream.reader.take(raw, 0.0))
    works = 0
    while stream.fed.intake.busy:
        stream.fed.intake.work()
        works += 1

    assert works > 10
    assert stream.sample(RESIDENT) == 50_000 - 2 * MAX_CHANGES
    assert lives(stream) == 2 * MAX_CHANGES


def test_an_engine_is_named_by_the_option_the_message_or_its_place() -> None:
    """In this order."""
    given = Stream("kv-events=tcp://h:1,engine=seven")
    given.take(batch(1.0, stored(1), rank=3))
    told = Stream()
    told.take(batch(1.0, stored(1), rank=3))
    place = Stream()
    place.take([1.0, [stored(1)], None])

    for stream, label in ((given, "seven"), (told, "3"), (place, "0")):
        (labels,) = stream.samples("sidestep_kv_cache_stored_blocks_total")
        assert f'engine="{label}"' in labels


def test_streams_of_one_rank_feed_one_engine() -> None:
    """Each its own families; what one says of its features does not take another's away."""
    kv = Stream("kv-events=tcp://h:1,model=m")
    load = Stream("load=tcp://h:2,model=m", kv.fed)
    kv.broke(WHOLE)
    kv.take(batch(1.0, stored(1)))
    load.take(["LoadStat", 3, 1, 10, 100, 0])
    kv.take(batch(1.0, stored(2)))

    (engine,) = kv.fed.intake.registry.engines.values()
    assert engine.features == {"kv_events", "load"}
    assert kv.sample(RESIDENT) == 2
    assert kv.sample("sidestep_load_running_requests") == 3
    assert kv.samples("sidestep_forward_pass_duration_seconds_count") == {}


def test_two_publishers_are_not_mixed() -> None:
    """Two of one kind that name one engine: the second is refused, and says why."""
    one = Stream("kv-events=tcp://h:1")
    other = Stream("kv-events=tcp://other:1", one.fed)
    one.broke(WHOLE)
    one.take(batch(1.0, stored(1)))
    other.take(batch(1.0, stored(5, 6)))

    assert one.sample(RESIDENT) == 1
    assert one.fed.rejected == {("engine_conflict",): 1}


def test_a_publisher_has_few_ranks() -> None:
    """One that names more lies."""
    stream = Stream()
    stream.take(*[batch(1.0, stored(1), rank=rank) for rank in range(MAX_FED + 9)])

    assert len(stream.fed.intake.registry.engines) == MAX_FED
    assert stream.fed.rejected == {("over_limit",): 9}


def test_an_engine_that_pushes_keeps_its_labels() -> None:
    """What its streams tell stands beside it, under the same ones."""
    stream = Stream("load=tcp://h:1,model=m")
    stream.take(["LoadStat", 3, 1, 10, 100, 0])
    labels = {"engine": "0", "model_name": "m"}
    stream.fed.greet("s", [EngineInfo("pushed", "vllm", labels)])

    page = stream.fed.page
    assert 'sidestep_load_running_requests{engine="0",model_name="m"} 3' in page
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 0' in page
    assert "origin" not in page
    read = stream.fed.intake.metrics._readings["sidestep_engine_up"]()
    assert dict(one for one in read if one is not None) == {
        ("0", "m", ""): 1.0,
        ("0", "m", "stream/m/0"): 1.0,
    }


def test_forward_passes_are_observed_and_idle_ones_are_not() -> None:
    """The recording of a whole load."""
    stream = Stream("forward-pass=tcp://h:1")
    stream.take(*(message.encoded for message in read("sglang_forward_pass")))

    prefix = "sidestep_forward_pass_"
    tokens = stream.samples(f"{prefix}tokens_total")
    assert [3098, 2340] == list(tokens.values())
    assert stream.sample(f"{prefix}prefill_kv_tokens_sum") == 5902
    assert stream.sample(f"{prefix}prefill_requests_sum") == 60
    assert stream.sample(f"{prefix}duration_seconds_count") == 296
    assert stream.sample(f"{prefix}scheduled_decode_requests") == 0
    assert stream.sample(f"{prefix}queued_prefill_requests") == 0


def test_load_adds_up() -> None:
    """The recording of a whole load; another process begins from nothing."""
    stream = Stream("load=tcp://h:1")
    stream.take(*(message.encoded for message in read("sglang_load_stat")))

    assert stream.sample("sidestep_load_prefill_uncached_tokens_total") == 3098
    assert stream.sample("sidestep_load_max_kv_tokens") == 4096
    stream.broke(Break(0, restarted=True, whole=False))
    stream.take(["LoadStat", 0, 0, 0, 0, 0, 0, 0, 0, 5000, 0])
    assert stream.sample("sidestep_load_prefill_uncached_tokens_total") == 8098


def test_sglangs_page_and_its_events_agree() -> None:
    """4084 tokens in blocks of one; what the recording missed is told before."""
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


def families(recordings: Iterable[str]) -> list[set[str]]:
    """Names of the families, by recording."""
    found = []
    for name in recordings:
        stream = Stream()
        stream.broke(WHOLE)
        stream.take(*(message.encoded for message in read(name)))
        page = stream.fed.page.splitlines()
        found.append({line.split("{")[0] for line in page if not line.startswith("#")})
    return found


def test_both_engines_have_the_same_families() -> None:
    """By their recordings, in either of which blocks are removed."""
    vllm, sglang = families(["vllm_kv_events", "sglang_kv_events"])

    assert vllm == sglang
    assert f"{LIFETIMES}_bucket" in vllm
    stream = Stream()
    stream.broke(WHOLE)
    stream.take(*(message.encoded for message in read("vllm_kv_events")))
    assert lives(stream) == 355
    assert stream.sample(RESIDENT) == 432 - 355


def test_gauges_go_with_the_publisher() -> None:
    """Counters stay, then all goes; a word of it brings them back."""
    stream = Stream("load=tcp://h:1")
    stream.take(["LoadStat", 3, 1, 10, 100, 0, 0, 0, 0, 10, 0])
    stream.fed.pass_time(GAUGES_EXPIRE_SECONDS + 1)
    assert stream.samples("sidestep_load_running_requests") == {}
    assert stream.sample("sidestep_load_prefill_uncached_tokens_total") == 0

    stream.feed.heard(stream.fed.now)
    assert stream.sample("sidestep_load_running_requests") == 3
    stream.fed.pass_time(ENGINE_EXPIRES_SECONDS + 2)
    assert stream.fed.page == ""
    stream.take(["LoadStat", 4, 1, 10, 100, 0, 0, 0, 0, 15, 0])
    assert stream.sample("sidestep_load_running_requests") == 4
    assert stream.sample("sidestep_load_prefill_uncached_tokens_total") == 5


def test_a_snapshot_has_where_a_stream_stopped() -> None:
    """Its number, its mark and its totals; and its gauges wait until it is heard."""
    before = Stream("kv-events=tcp://h:1,model=m")
    before.broke(WHOLE)
    before.take(batch(1.0, stored(1, 2, 3)))
    before.feed.took(41, 7, 8)
    pieces = list(Capture(before.fed.intake).pieces())

    fed = Fed(rate=1.0, boot=2)
    restore(fed.intake, pieces, 0.0)
    after = Stream("kv-events=tcp://h:1,model=m", fed)
    assert (after.feed.seq, list(after.feed.mark)) == (41, [7, 8])
    fed.pass_time(1)
    assert next(Capture(fed.intake).pieces()) == pieces[0]
    after.feed.heard(fed.now)
    after.take(batch(2.0, removed(1)))
    assert after.sample(RESIDENT) == 2
    assert after.samples("sidestep_kv_cache_stored_blocks_total").popitem()[1] == 3


def test_nobody_takes_the_place_of_a_stream_of_this_process() -> None:
    """A sender may choose its id, but not this one."""
    stream = Stream()
    stream.take(batch(1.0, stored(1)))
    name = stream.feed.subscription.name
    stream.fed.greet(name, [EngineInfo("e", "vllm", {"engine": "e", "model_name": "m"})])

    assert stream.fed.intake.receiver.streams[name].local
    assert "e" not in stream.fed.intake.registry.engines


@pytest.mark.parametrize("label", ["medium", "le", "origin", "phase"])
def test_labels_that_rows_have_are_refused(label: str) -> None:
    """Before anything is read."""
    stream = Stream(f"kv-events=tcp://h:1,label.{label}=x")

    with pytest.raises(Exception, match="bad_label"):
        stream.feed.check()
