"""Lookups of vLLM's requests, as the tap records them, and the caches that have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_taps import Bench
from sidestep.protocol.cache_lookups import (
    AGAIN,
    COUNTED,
    NOT_LOOKED_UP,
    CacheLookups,
    Cleared,
    Lookup,
    LookupEvent,
    Released,
)
from sidestep_adapters.publisher.cache_lookups import LookupEvents
from sidestep_adapters.vllm.kv_cache import lookup_events

SIZE = 16


class Lookups(Bench):
    """A tap that records lookups, and the requests of a scheduler."""

    def __init__(self) -> None:
        super().__init__(lookups=LookupEvents(SIZE, 100, 0, lambda: (b"key", 1.0)))

    def ask_blocks(self, name: str, blocks: int, **more: Any) -> Any:
        """Queue a request with full blocks and one token more."""
        tokens = blocks * SIZE + 1
        hashes = [bytes([number]) * 32 for number in range(blocks)]
        own = {"num_prompt_tokens": tokens, "num_tokens": tokens, "prefill_stats": None}
        return self.ask(name, block_hashes=hashes, **own | more)

    def lookups(self) -> list[LookupEvent]:
        """Return the events of all lookups pushed."""
        return [e for item in self.decoded() if isinstance(item, CacheLookups) for e in item.events]


def test_a_lookup_is_that_of_its_step() -> None:
    """What happens to the request before the publisher's thread reads it changes nothing."""
    bench = Lookups()
    request = bench.ask_blocks("a", 3)
    bench.schedule("a", found=2 * SIZE)
    bench.tap.preempted("a", 3.0)
    request.num_preemptions = 1
    request.num_tokens = 90
    request.block_hashes += [b"x" * 32, b"y" * 32]
    bench.schedule(resumed=("a",))
    first, released, again = bench.lookups()

    assert isinstance(first, Lookup)
    assert (first.kind, first.tokens, first.blocks, first.found) == (COUNTED, 49, 3, 2)
    assert isinstance(released, Released)
    assert isinstance(again, Lookup)
    assert (again.kind, again.tokens, again.blocks) == (AGAIN, 90, 5)
    assert not bench.failures


def test_what_another_cache_had_is_not_found_here() -> None:
    """With a KV connector the request starts with more than the own cache has."""
    bench = Lookups()
    bench.ask_blocks("a", 3, prefill_stats=SimpleNamespace(num_local_cached_tokens=SIZE))
    bench.schedule("a", found=3 * SIZE)
    (lookup,) = bench.lookups()

    assert isinstance(lookup, Lookup)
    assert lookup.found == 1


def test_requests_that_may_not_read_the_cache_look_nothing_up() -> None:
    """Their blocks are used all the same; a session that continues is a use as well."""
    bench = Lookups()
    bench.ask_blocks("a", 2, skip_reading_prefix_cache=True)
    bench.ask_blocks("b", 2)
    bench.schedule("a", "b", found=0)
    bench.schedule("b", found=0)
    uncounted, counted, ended, continued = bench.lookups()

    assert isinstance(uncounted, Lookup)
    assert uncounted.kind == NOT_LOOKED_UP
    assert isinstance(counted, Lookup)
    assert isinstance(ended, Released)
    assert isinstance(continued, Lookup)
    assert (counted.kind, continued.kind) == (COUNTED, AGAIN)


def test_a_reset_and_an_end_are_recorded() -> None:
    """In the order in which they happen."""
    bench = Lookups()
    request = bench.ask_blocks("a", 2)
    bench.schedule("a", found=0)
    bench.tap.freed(request)
    bench.tap.cache_cleared()

    assert [type(event) for event in bench.lookups()] == [Lookup, Released, Cleared]


class FullAttentionSpec:
    """vLLM's blocks of full attention."""

    block_size, page_size_bytes = SIZE, 1000


class MLAAttentionSpec(FullAttentionSpec):
    """Blocks of full attention in another form."""


class SlidingWindowSpec:
    """Blocks that are dropped once they are out of the window."""

    block_size, page_size_bytes = SIZE, 1000


def scheduler(*specs: Any, caching: bool = True) -> Any:
    """Return a scheduler whose cache has a group of two layers for each kind of block."""
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"]) for spec in specs]
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups, num_blocks=101),
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=caching)),
        hash_block_size=2 * SIZE,
    )


@pytest.mark.parametrize("spec", [FullAttentionSpec, MLAAttentionSpec])
def test_the_size_of_the_cache_is_that_of_its_blocks(spec: type) -> None:
    """Without the null block; with context parallelism a hash stands for more tokens, not for more blocks."""
    made = lookup_events(scheduler(spec()), lambda: (b"key", 1.0))
    assert made is not None
    made.looked_up(1, 1.0, [b"a" * 32], 50, 0)
    (item,) = made.items(1.0)

    assert (item.block_size, item.capacity, item.block_bytes) == (2 * SIZE, 100, 2000)


@pytest.mark.parametrize(
    "other",
    [
        scheduler(FullAttentionSpec(), caching=False),
        scheduler(SlidingWindowSpec()),
        scheduler(FullAttentionSpec(), SlidingWindowSpec()),
        scheduler(),
    ],
)
def test_other_caches_send_no_lookups(other: Any) -> None:
    """Their blocks are found and evicted by rules of their own."""
    assert lookup_events(other, lambda: (b"key", 1.0)) is None
