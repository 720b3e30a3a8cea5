"""Matches in SGLang's radix cache as lookups of blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sidestep.protocol.cache_lookups import (
    AGAIN,
    COUNTED,
    CacheLookups,
    Cleared,
    Lookup,
    LookupEvent,
    Released,
)
from sidestep_adapters.sglang import plugin
from sidestep_adapters.sglang.deferred_metrics import DeferredMetrics
from sidestep_adapters.sglang.lookups import BLOCK_SIZE, LookupRecorder

ENGINE = 3


class Bench:
    """A recorder, and what it makes of the requests of a scheduler."""

    def __init__(self, **tree: Any) -> None:
        self.deferred = DeferredMetrics()
        publisher = SimpleNamespace(lookup_key=b"key", kv_sample_rate=1.0)
        self.recorder = LookupRecorder(self.deferred, ENGINE, lambda: publisher)
        self.tree = SimpleNamespace(page_size=1, **tree)
        kv_cache = SimpleNamespace(get_kv_size_bytes=lambda: (32_000, 32_000))
        self.pool = SimpleNamespace(size=6400, get_kvcache=lambda: kv_cache)

    def begin(self, *reqs: Any) -> None:
        """Put requests into a batch of prefills."""
        batch = SimpleNamespace(
            reqs=reqs, tree_cache=self.tree, token_to_kv_pool_allocator=self.pool
        )
        self.recorder.began(batch)

    def items(self) -> list[CacheLookups]:
        """Return the items of what was recorded."""
        return [item for item in self.deferred.items() if isinstance(item, CacheLookups)]

    def events(self) -> list[LookupEvent]:
        """Return the events of the items."""
        return [event for item in self.items() for event in item.events]


def request(rid: str, tokens: Sequence[int], found: int = 0, **more: object) -> Any:
    """Return a request in a batch."""
    fields = {
        "rid": rid,
        "origin_input_ids": array("q", tokens),
        "output_ids": [],
        "prefix_len": found,
        "cached_tokens_device": found,
        "retracted_stain": False,
        "lora_id": None,
        "extra_key": None,
        "cache_salt": None,
        **more,
    }
    return SimpleNamespace(**fields)


def test_a_request_looks_up_its_prompt_and_leaves_its_output() -> None:
    """Chunks of a long prefill are one lookup; blocks of the output are released with the prompt's."""
    bench = Bench()
    one = request("a", range(100), 40)
    bench.begin(one)
    one.prefix_len = 64
    bench.begin(one)
    one.output_ids = [*range(1000, 1060)]
    bench.recorder.released(one)
    bench.recorder.released(one)
    (item,) = bench.items()

    assert (item.engine, item.block_size, item.capacity) == (ENGINE, BLOCK_SIZE, 200)
    assert item.block_bytes == 10 * BLOCK_SIZE
    lookup, released = item.events
    assert isinstance(lookup, Lookup)
    assert (lookup.kind, lookup.blocks, lookup.found) == (COUNTED, 3, 1)
    # 8 tokens of the second block were found: 4 of those in no full block are left out for them.
    assert lookup.tokens == 96
    assert isinstance(released, Released)
    # 159 tokens have KV: four full blocks, of which three were looked up.
    assert (released.key_count, len(released.sampled)) == (3, 1)


def test_a_retracted_request_is_looked_up_again() -> None:
    """SGLang does not count that lookup, which has the output so far."""
    bench = Bench()
    one = request("a", range(64))
    bench.begin(one)
    one.output_ids = [*range(500, 540)]
    bench.recorder.released(one)
    one.retracted_stain = True
    bench.begin(one)
    _, _, again = bench.events()

    assert isinstance(again, Lookup)
    assert (again.kind, again.tokens, again.blocks) == (AGAIN, 104, 3)


def test_equal_prefixes_of_one_namespace_have_equal_keys() -> None:
    """Those of another adapter, salt or key of the client do not."""
    bench = Bench()
    spaces: tuple[dict[str, Any], ...] = (
        {},
        {},
        {"lora_id": "x"},
        {"cache_salt": "x"},
        {"extra_key": "x"},
    )
    for number, space in enumerate(spaces):
        bench.begin(request(str(number), [*range(64), number], **space))
    first, same, *others = [e.sampled for e in bench.events() if isinstance(e, Lookup)]

    assert first == same
    assert len({tuple(keys) for keys in (first, *others)}) == 4


def test_a_flush_is_told() -> None:
    """Before the first request there is nothing to clear."""
    bench = Bench()
    bench.recorder.cleared()
    assert not bench.events()
    bench.begin(request("a", range(64)))
    bench.recorder.cleared()

    assert isinstance(bench.events()[-1], Cleared)


@pytest.mark.parametrize(
    "tree", [{"disable": True}, {"supports_swa": lambda: True}, {"supports_mamba": lambda: True}]
)
def test_caches_that_are_no_single_tree_are_left_alone(tree: dict[str, Any]) -> None:
    """Without a radix cache, and with layers that are evicted by rules of their own."""
    bench = Bench(**tree)
    bench.begin(request("a", range(64)))

    assert not bench.deferred.queue


def test_hooks_raise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object of another release is counted as unreadable; a process without a scheduler has no recorder."""
    failures: list[str] = []
    deferred = SimpleNamespace(fail=failures.append)
    recorder = Bench().recorder
    own = SimpleNamespace(lookups=recorder, deferred=deferred)
    monkeypatch.setattr(plugin, "process", lambda: own)
    began, released, cleared = plugin.LOOKUPS.values()
    began(None, object())
    released(None, object(), object())
    own.lookups = None
    began(None, object())
    cleared(None, object())

    assert len(failures) == 1
