"""Frames and items: what goes in comes out, and nothing else ever does."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.engines import items as wire_items
from sidestep.engines.items import (
    Item,
    VllmRejection,
    VllmSleep,
    VllmStep,
    decode_item,
    encode_item,
)
from sidestep.engines.vllm.wire import CacheStats, SchedulerStats, SpecDecodingStats
from sidestep.errors import WireError
from sidestep.protocol.block_events import BlockEvents, CacheChange, CacheEvents
from sidestep.protocol.iteration_stats import (
    FinishedRequestStats,
    IterationStats,
    KVCacheEvictionEvent,
)
from sidestep.protocol.limits import (
    COUNT_LIMIT,
    MAX_FRAME_BYTES,
    MAX_OBSERVATIONS,
    TOKENS_LIMIT,
    VERSION,
)
from sidestep.protocol.messages import (
    Ack,
    Batch,
    Bye,
    EngineInfo,
    Heartbeat,
    Hello,
    Nack,
    decode_from_exporter,
    decode_from_sender,
    encode,
)
from sidestep.protocol.request_events import (
    MAX_BATCH,
    MAX_EVENTS,
    Alive,
    Event,
    Finished,
    Iteration,
    Output,
    Preempted,
    Prompt,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.protocol.self_described import Family, Sample, Samples

counts = st.integers(0, COUNT_LIMIT)
numbers = st.floats(-1e15, 1e15)
seconds = st.floats(0, 1e15)
texts = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)
ids = st.integers(0, 1 << 62)
tallies = st.dictionaries(texts, counts, max_size=3)

caches = st.builds(CacheStats, reset=st.booleans(), queries=counts, hits_by_source=tallies)
steps = st.builds(
    VllmStep,
    engine=st.integers(0, 9),
    stamp=seconds,
    wall=seconds,
    scheduler=st.none()
    | st.builds(
        SchedulerStats,
        num_running_reqs=counts,
        kv_cache_usage=st.floats(0, 1),
        prefix_cache_stats=st.none() | caches,
        kv_cache_eviction_events=st.lists(
            st.builds(KVCacheEvictionEvent, numbers, numbers, st.lists(numbers, max_size=4)),
            max_size=3,
        ),
        spec_decoding_stats=st.none()
        | st.builds(SpecDecodingStats, num_accepted_tokens_per_pos=st.lists(counts, max_size=4)),
        running_lora_adapters=tallies,
    ),
    iteration=st.none()
    | st.builds(
        IterationStats,
        num_generation_tokens=counts,
        inter_token_latencies_iter=st.lists(seconds, max_size=5),
        finished_requests=st.lists(
            st.builds(FinishedRequestStats, finish_reason=counts, e2e_latency=st.none() | numbers),
            max_size=3,
        ),
    ),
    mm_cache=st.none() | caches,
    more=st.booleans(),
)
samples = st.builds(
    Samples,
    engine=st.integers(0, 9),
    stamp=seconds,
    families=st.lists(
        st.builds(
            Family,
            name=st.from_regex(r"[a-z_:]{1,20}", fullmatch=True),
            kind=st.sampled_from(["counter", "gauge", "histogram"]),
            samples=st.lists(
                st.builds(Sample, st.lists(texts, max_size=2), numbers, st.lists(seconds)),
                max_size=2,
            ),
        ),
        max_size=2,
    ),
)
numbered = st.lists(counts, max_size=4)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Queued, counts, seconds, seconds, counts, texts, counts, counts),
    st.builds(Scheduled, counts, seconds),
    st.builds(Preempted, counts, seconds),
    st.builds(
        Iteration,
        seconds,
        seconds,
        seconds,
        st.lists(
            st.builds(
                Output, seconds, numbered, st.lists(st.integers(0, TOKENS_LIMIT), max_size=3)
            ),
            max_size=2,
        ),
        st.none() | numbered,
        numbered,
        counts,
        st.lists(st.builds(Prompt, counts, counts, counts, counts), max_size=2),
    ),
    st.builds(Finished, counts, seconds, seconds, counts, max_tokens=st.none() | counts),
    st.builds(Alive, counts, seconds, counts, seconds, counts, texts),
)
hashes = st.lists(st.integers(0, (1 << 64) - 1), max_size=4)
changes = st.builds(
    CacheChange, st.sampled_from(["stored", "removed", "cleared"]), seconds, hashes, texts
)
items: st.SearchStrategy[Item] = st.one_of(
    st.builds(RequestEvents, counts, seconds, counts, st.lists(events, max_size=4)),
    st.builds(
        BlockEvents,
        counts,
        seconds,
        counts,
        st.floats(0, 1),
        st.binary(max_size=4),
        numbered,
        st.lists(seconds, max_size=4),
    ),
    st.builds(CacheEvents, counts, seconds, counts, st.lists(changes, max_size=3)),
    steps,
    samples,
    st.builds(VllmSleep, engine=counts, stamp=seconds, sleep=st.integers(0, 1)),
    st.builds(VllmRejection, engine=counts, stamp=seconds, reason=texts),
)
engines = st.builds(
    EngineInfo,
    id=texts,
    dialect=texts,
    labels=st.dictionaries(st.sampled_from(["engine", "model_name", "zone"]), texts),
    bounds=st.dictionaries(texts, st.just([1.0, 2.0]), max_size=2),
    features=st.lists(texts, max_size=2),
)
from_sender = st.one_of(
    st.builds(Hello, st.just(VERSION), texts, ids, ids, ids, st.lists(engines, max_size=2)),
    st.builds(
        Batch,
        ids,
        ids,
        st.lists(items.map(lambda item: msgspec.Raw(encode_item(item))), max_size=3),
    ),
    st.builds(Heartbeat, ids, ids, counts, counts, counts),
    st.builds(Bye, ids, ids, texts),
)
from_exporter = st.one_of(
    st.builds(
        Ack, st.just(VERSION), ids, ids, st.none() | ids, ids, ids, st.none() | st.floats(0, 1)
    ),
    st.builds(Nack, ids, ids, texts, texts),
)


@given(items)
def test_items_come_back_as_they_went(item: Item) -> None:
    """Decoding an encoded item gives it again."""
    assert decode_item(encode_item(item)) == item


@given(from_sender)
def test_messages_come_back_as_they_went(message: Any) -> None:
    """Decoding an encoded message gives it again, whichever end it comes from."""
    assert decode_from_sender(encode(message)) == message


@given(from_exporter)
def test_answers_come_back_as_they_went(message: Any) -> None:
    """Likewise what the exporter answers."""
    assert decode_from_exporter(encode(message)) == message


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_wire_error(data: bytes) -> None:
    """Nothing a peer can send raises anything else."""
    for decode in (decode_from_sender, decode_from_exporter, decode_item):
        try:
            decode(data)
        except WireError:
            continue


@given(st.one_of(from_sender.map(encode), items.map(encode_item)), st.data())
def test_damaged_frames_give_a_message_or_a_wire_error(frame: bytes, data: st.DataObject) -> None:
    """Flipped, cut and repeated bytes of real frames are contained likewise."""
    damaged = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for part in (bytes(damaged), bytes(damaged[:cut]), bytes(damaged) * 2):
        for decode in (decode_from_sender, decode_item):
            try:
                decode(part)
            except WireError:
                continue


HOSTILE = {
    "deep arrays": b"\x91" * 100_000,
    "deep arrays in a field to come": b"\x98\xa2vz\x00\x00\x00\x00" + b"\x91" * 100_000,
    "2^32 elements": b"\xdd\xff\xff\xff\xff",
    "2^32 characters": b"\x96\xa1H\x01\xdb\xff\xff\xff\xff",
    "bad text": b"\x94\xa2vr\x00\x00\xa2\xff\xfe",
    "nothing": b"",
    "never used": b"\xc1",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_wire_errors(data: bytes) -> None:
    """Depth, declared sizes and text that is none cost nothing but a refusal."""
    with pytest.raises(WireError):
        decode_item(data)
    with pytest.raises(WireError):
        decode_from_sender(data)


@pytest.mark.parametrize(
    "item",
    [
        VllmStep(-1, 0.0, 0.0),
        VllmStep(0, float("nan"), 0.0),
        VllmStep(0, 0.0, float("inf")),
        VllmStep(0, 0.0, 0.0, SchedulerStats(num_running_reqs=COUNT_LIMIT + 1)),
        VllmStep(0, 0.0, 0.0, SchedulerStats(kv_cache_usage=float("nan"))),
        VllmStep(
            0,
            0.0,
            0.0,
            None,
            IterationStats(inter_token_latencies_iter=[0.1] * (MAX_OBSERVATIONS + 1)),
        ),
        Samples(0, 0.0, [Family("with space", "gauge")]),
        Samples(0, 0.0, [Family("newline\n", "gauge")]),
        VllmRejection(0, 0.0, "x" * 300),
        RequestEvents(0, 0.0, 1, [Scheduled(1, 0.0)] * (MAX_EVENTS + 1)),
        RequestEvents(0, 0.0, 1, [Scheduled(-1, 0.0)]),
        RequestEvents(0, 0.0, 1, [Scheduled(1, float("nan"))]),
        RequestEvents(0, 0.0, 1, [Queued(1, 0.0, adapter="x" * 300)]),
        RequestEvents(0, 0.0, 1, [Iteration(0.0, 0.0, 0.0, [Output(0.0, [1] * (MAX_BATCH + 1))])]),
        BlockEvents(0, 0.0, 1, 1.5),
        BlockEvents(0, 0.0, 1, 1.0, bytes(MAX_OBSERVATIONS + 1)),
        CacheEvents(0, 0.0, 1, [CacheChange("stored", 0.0, [-1])]),
    ],
)
def test_items_beyond_a_limit_are_refused(item: Item) -> None:
    """Negative, infinite, oversized and unprintable fields do not get in."""
    with pytest.raises(WireError):
        decode_item(encode_item(item))


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), float("inf"), "1"])
def test_a_sample_rate_that_is_no_share_is_refused(rate: Any) -> None:
    """An engine must not be made to follow more blocks than there are."""
    with pytest.raises(WireError):
        decode_from_exporter(encode(Ack(VERSION, 1, 1, None, 0, 0, rate)))


def test_a_frame_over_the_limit_is_refused_unread() -> None:
    """Size is looked at before anything is decoded."""
    with pytest.raises(WireError) as caught:
        decode_from_sender(b"\x00" * (MAX_FRAME_BYTES + 1))

    assert caught.value.reason == "too_big"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": VERSION + 1}, "version"),
        ({"stream": "a\nb"}, "bad_label"),
        ({"engines": [EngineInfo("e", "vllm", {"engine": "\x00"})]}, "bad_label"),
        ({"engines": [EngineInfo("e", "vllm", {}, {}, {"x": [2.0, 1.0]})]}, "bad_bounds"),
        ({"engines": [EngineInfo("e", "vllm", {"9": "x"})]}, "bad_schema"),
        ({"engines": [EngineInfo("e", "vllm", {"__name__": "x"})]}, "bad_schema"),
    ],
)
def test_a_hello_that_cannot_be_true_is_refused(change: dict[str, Any], reason: str) -> None:
    """Version, names and bounds are checked when a stream opens."""
    hello = Hello(VERSION, "s", 1, 1, 1, [])
    for name, value in change.items():
        setattr(hello, name, value)

    with pytest.raises(WireError) as caught:
        decode_from_sender(encode(hello))

    assert caught.value.reason == reason


def test_fields_to_come_are_passed_over() -> None:
    """An item of a later release decodes: what it has more stands at the end."""
    later = msgspec.msgpack.encode(["vz", 0, 1.5, 1, 2, "new", {"field": [1]}])

    assert decode_item(later) == VllmSleep(0, 1.5, 1, 2)


def test_every_kind_of_item_has_a_tag_of_its_own() -> None:
    """Two kinds with one tag could not be told apart."""
    kinds = wire_items.Item.__args__
    tags = [kind.__struct_config__.tag for kind in kinds]

    assert len(set(tags)) == len(tags)
