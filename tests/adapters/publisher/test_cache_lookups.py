"""Lookups of a prefix cache as items, and the curve that the exporter makes of them."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_caches import BLOCK_SIZE, PrefixCache, Request, chain, conversations
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.protocol.cache_lookups import (
    HOT_STEP,
    MAX_KEYS,
    CacheLookups,
    Lookup,
    Released,
)
from sidestep.tracking.kv_blocks.hot_blocks import LEAST
from sidestep.tracking.kv_blocks.lookups import LookupSettings, LookupTracker
from sidestep_adapters.publisher.cache_lookups import ALL, LookupEvents

KEY = b"k" * 16
PRESENT = 1500
"""Blocks of the cache whose lookups are sent."""


def maker(rate: float = 1.0, key: bytes = KEY, capacity: int = 0) -> LookupEvents:
    """Return a maker of items, of a cache of unknown size unless it has a ``capacity``."""
    return LookupEvents(BLOCK_SIZE, capacity, 4096, lambda: (key, rate))


def sent(events: LookupEvents, stamp: float = 1.0) -> list[CacheLookups]:
    """Return the items, after encoding and decoding."""
    found = [DIALECTS.decode(encode_item(item)) for item in events.items(stamp)]
    return [item for item in found if isinstance(item, CacheLookups)]


def lookups(events: LookupEvents) -> list[Lookup]:
    """Return the lookups of all items."""
    return [e for item in sent(events) for e in item.events if isinstance(e, Lookup)]


def serve(
    requests: list[Request], events: LookupEvents, cache: PrefixCache, tracker: LookupTracker
) -> dict[str, int]:
    """Serve requests, eight at a time; return the missed tokens by reason."""
    running: deque[tuple[int, Request]] = deque()
    missed: dict[str, int] = {}
    for number, request in enumerate(requests):
        events.looked_up(
            number, float(number), request.prompt, request.tokens, cache.admit(request)
        )
        running.append((number, request))
        if len(running) > 8:
            ended, released = running.popleft()
            cache.release(released)
            events.released(ended, float(number), [*released.prompt, *released.output])
        for item in sent(events, float(number)):
            for reason, tokens in tracker.apply(item).missed.items():
                missed[reason] = missed.get(reason, 0) + tokens
    return missed


def hit_ratio(requests: list[Request], capacity: int) -> float:
    """Return the share of tokens that requests find in a cache of ``capacity``, eight at a time."""
    cache, running = PrefixCache(capacity), deque[Request]()
    for request in requests:
        cache.admit(request)
        running.append(request)
        if len(running) > 8:
            cache.release(running.popleft())
    return cache.found / cache.tokens


@pytest.mark.parametrize(("rate", "limit", "seed"), [(1.0, 0.01, 1), (0.1, 0.03, 2)])
def test_the_curve_of_one_cache_is_what_caches_of_other_sizes_find(
    rate: float, limit: float, seed: int
) -> None:
    """The same requests find as much in caches of half to four times the size as the curve says."""
    requests = [*conversations(1500, seed)]
    tracker = LookupTracker(LookupSettings(half_life=1e9))
    present = PrefixCache(PRESENT)
    missed = serve(requests, maker(rate), present, tracker)

    for size in (0.5, 1.0, 2.0, 4.0):
        capacity = int(PRESENT * size)
        (point,) = tracker.reuse.points([capacity])
        assert abs(point.hit_ratio - hit_ratio(requests, capacity)) < limit
    assert tracker.reuse.curve.hit_ratio == pytest.approx(present.found / present.tokens)
    missing = present.tokens - present.found
    assert sum(missed.values()) == pytest.approx(missing, rel=0.001 if rate == 1.0 else 0.1)
    assert missed["unknown"] == missed["cleared"] == missed["not_cacheable"] == 0
    assert min(missed["cold"], missed["evicted"], missed["too_short"]) > 0


def test_blocks_are_named_by_the_exporters_key_alone() -> None:
    """Engines with the same key send the same keys, others do not, and no hash is in them."""
    blocks = chain(Random(1), [], 2000)
    keys = []
    for key in (b"one", b"one", b"two"):
        events = maker(0.25, key)
        events.looked_up(1, 1.0, blocks, 2000 * BLOCK_SIZE + 1, 0)
        keys.append({one for lookup in lookups(events) for one in lookup.sampled})
        assert all(one >= ALL * 0.75 for one in keys[-1])
    prefixes = {int.from_bytes(block[:8], "big") for block in blocks}

    assert keys[0] == keys[1]
    assert not keys[0] & keys[2]
    assert not keys[0] & prefixes
    assert 400 < len(keys[0]) < 600


def test_keys_of_hot_blocks_say_whether_they_are_in_the_sample() -> None:
    """Each block of the sample stands for several, which one beside it must not."""
    events, blocks = maker(0.25), chain(Random(1), [], 800)
    for number in range(LEAST):
        events.looked_up(number, 1.0, blocks, 800 * BLOCK_SIZE + 1, 0)
    (found,) = (lookup.hot for lookup in lookups(events) if lookup.hot)

    sampled = [int.from_bytes(block[:8], "big") < ALL // 4 for block in blocks[::HOT_STEP]]
    assert [key >= ALL // 4 * 3 for key in found] == sampled


@given(st.integers(0, 5000), st.sampled_from([0.01, 0.3, 1.0]), st.integers(0, 1 << 32))
def test_no_item_has_more_keys_than_it_may(blocks: int, rate: float, seed: int) -> None:
    """A long prompt is sent in parts, of which the first alone has its tokens and blocks."""
    events, hashes = maker(rate), chain(Random(seed), [], blocks)
    for number in range(10):
        events.looked_up(number, 1.0, hashes, blocks * BLOCK_SIZE + 1, blocks * BLOCK_SIZE)
        events.released(number, 2.0, hashes)
    items = sent(events)

    found = [event for item in items for event in item.events if isinstance(event, Lookup)]
    for item in items:
        looked_up = [event for event in item.events if isinstance(event, Lookup)]
        released = [event for event in item.events if isinstance(event, Released)]
        keys = sum(len(event.hot) + len(event.sampled) for event in looked_up)
        assert keys + sum(event.key_count + len(event.sampled) for event in released) <= MAX_KEYS
    assert [event.tokens for event in found if event.tokens] == [blocks * BLOCK_SIZE + 1] * 10
    for number in range(10):
        mine = [event for event in found if event.request == number]
        sampled = [key for event in mine for key in event.sampled]
        assert len({*sampled}) == len(sampled)
        assert all(event.sampled_found == len(event.sampled) for event in mine)
        assert len(mine[0].hot) == -(-mine[0].hot_blocks // HOT_STEP)
        assert not {*mine[0].hot} & {*sampled}
        ended = [e for i in items for e in i.events if isinstance(e, Released)]
        parts = [event.key_count for event in ended if event.request == number]
        assert sum(parts) == len(sampled) + len(mine[0].hot)
        if rate == 1.0:
            assert len(sampled) + len(mine[0].hot) == blocks
    assert items[0].before == 0


def test_the_block_of_the_last_token_cannot_be_found() -> None:
    """A prompt that fills its last block has one block less to look up, and a whole one to compute."""
    events, hashes = maker(), chain(Random(1), [], 2)
    events.looked_up(1, 1.0, hashes, 2 * BLOCK_SIZE, BLOCK_SIZE)
    events.looked_up(2, 1.0, hashes, 2 * BLOCK_SIZE + 1, 2 * BLOCK_SIZE)
    full, longer = lookups(events)
    events.released(1, 2.0, hashes)
    ((ended,),) = [item.events for item in sent(events)]

    assert (full.blocks, full.found) == (1, 1)
    assert (longer.blocks, longer.found) == (2, 2)
    assert isinstance(ended, Released)
    assert (ended.key_count, len(ended.sampled)) == (1, 1)


def test_nothing_is_sent_that_nobody_wants() -> None:
    """Without the exporter's key, or with a sample rate of 0, there are no items."""
    for events in (maker(0.0), maker(1.0, b"")):
        events.looked_up(1, 1.0, chain(Random(1), [], 5), 100, 0)
        events.released(1, 2.0, [])
        events.cleared(3.0)
        assert not sent(events)


def test_another_key_or_rate_begins_anew() -> None:
    """The source changes, and says that there were lookups before."""
    wanted = [(KEY, 1.0)]
    events = LookupEvents(BLOCK_SIZE, 0, 0, lambda: wanted[0])
    hashes = chain(Random(1), [], 5)
    sources = []
    for key, rate in ((KEY, 1.0), (b"other", 1.0), (b"other", 0.5), (b"other", 0.5)):
        wanted[0] = key, rate
        events.looked_up(1, 1.0, hashes, 100, 0)
        (item,) = sent(events)
        sources.append(item.source)
        assert item.rate == rate
        assert item.before == len(sources) - 1

    assert len({*sources}) == 3
    assert sources[2] == sources[3]
