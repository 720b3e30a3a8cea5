"""Lookups of vLLM's prefix cache: families, the gauges of the curve, folding and sharing."""

from __future__ import annotations

from random import Random

import pytest

from prefix_caches import BLOCK_SIZE, PrefixCache, conversations
from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import encode_item
from sidestep.metrics.hit_ratio_curves import HitRatioCurves
from sidestep.metrics.totals_codec import decode_totals
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.cache_lookups import CacheLookups
from sidestep.protocol.messages import EngineInfo, Settings
from sidestep_adapters.publisher.cache_lookups import LookupEvents
from vllm_bench import Bench

HIT_RATIO = "sidestep_kv_whatif_hit_ratio"
SHARED = "sidestep_kv_whatif_shared_hit_ratio"
MISSED = "sidestep_kv_missed_tokens_total"
CAPACITY = 800
BLOCK_BYTES = 1 << 20


def maker(rate: float = 1.0, capacity: int = CAPACITY) -> LookupEvents:
    """Return a maker of items that all engines share a key with."""
    return LookupEvents(BLOCK_SIZE, capacity, BLOCK_BYTES, lambda: (b"key", rate))


def items(count: int, seed: int = 1) -> list[CacheLookups]:
    """Return the items of conversations in a cache, one request after the other."""
    events, cache = maker(), PrefixCache(CAPACITY)
    found = []
    for number, request in enumerate(conversations(count, seed)):
        stamp = float(number)
        events.looked_up(number, stamp, request.prompt, request.tokens, cache.admit(request))
        cache.release(request)
        events.released(number, stamp + 0.5, [*request.prompt, *request.output])
        found += events.items(stamp + 0.5)
    return found


def read_curves(bench: Bench, curves: HitRatioCurves | None = None) -> None:
    """Update the gauges of all engines."""
    curves = curves or HitRatioCurves(bench.registry)
    for call in range(len(bench.engines) + 1):
        curves.update(1e9 + call / 10)


def test_lookups_feed_the_families() -> None:
    """The hit ratio grows with the size, and every token that was not found has a reason."""
    bench = Bench()
    bench.engine()
    bench.apply(*items(1000))
    read_curves(bench)

    ratios = [bench.values(HIT_RATIO)[f"{size}x",] for size in ("0.25", 0.5, 1, 2, 4, 8)]
    assert ratios == sorted(ratios)
    assert ratios[0] + 0.2 < ratios[-1] < 1.0
    missed = {reason: tokens for (reason,), tokens in bench.values(MISSED).items()}
    assert {reason for reason, tokens in missed.items() if tokens} == {
        "cold", "evicted", "too_short"
    }  # fmt: skip
    idles = bench.value("sidestep_kv_missed_block_idle_seconds")
    assert sum(idles.counts) * BLOCK_SIZE == missed["evicted"]
    assert 0 < bench.value("sidestep_kv_whatif_hit_ratio_per_gib") < 1
    assert 100 < bench.value("sidestep_kv_working_set_blocks")
    assert CAPACITY < bench.value("sidestep_kv_whatif_sufficient_blocks") < 8 * CAPACITY
    assert not bench.values(SHARED)


def test_two_engines_of_a_model_share_what_routing_by_prefix_could_win() -> None:
    """Conversations that are spread at random would find more in one cache."""
    bench = Bench()
    makers, caches = (maker(), maker()), (PrefixCache(CAPACITY), PrefixCache(CAPACITY))
    for name in ("0", "1"):
        bench.engine(name, labels={"engine": name, "model_name": "m"})
    bench.engine("other", labels={"engine": "0", "model_name": "another"})
    random, curves = Random(1), HitRatioCurves(bench.registry)
    for number, request in enumerate(conversations(2500, 3)):
        index, stamp = random.randrange(2), float(number)
        events, cache = makers[index], caches[index]
        events.looked_up(number, stamp, request.prompt, request.tokens, cache.admit(request))
        cache.release(request)
        events.released(number, stamp + 0.5, [*request.prompt, *request.output])
        bench.apply(*events.items(stamp + 0.5), to=str(index))
        if number % 25 == 0:
            curves.update(stamp)
    bench.apply(*items(10), to="other")
    read_curves(bench, curves)
    shared = bench.values(SHARED)

    measured = sum(cache.found for cache in caches) / sum(cache.tokens for cache in caches)
    assert len(shared) == 2 or len({*shared.values()}) == 1
    routed = PrefixCache(2 * CAPACITY)
    for request in conversations(2500, 3):
        routed.admit(request)
        routed.release(request)
    for ratio in shared.values():
        assert ratio == pytest.approx(routed.found / routed.tokens, abs=0.03)
        assert ratio > measured + 0.05


def test_folded_lookups_have_an_unknown_reason() -> None:
    """Who folds them has not seen the blocks; the exporter starts anew, and loses no token."""
    bench = Bench()
    bench.engine()
    sent = items(300)
    bench.apply(*sent[:100])
    info = EngineInfo("0", "vllm", {"engine": "0", "model_name": "m"})
    folder = ItemFolder()
    folder.settings = Settings()
    for item in sent[100:200]:
        assert folder.fold(encode_item(item), [info])
    for frame in folder.seal().frames:
        for raw in frame:
            bench.applier.add_totals(bench.engines["0"], decode_totals(raw))
    (lookups,) = [bench.engines["0"].part(Trackers).lookups]
    assert lookups is not None
    assert lookups.reuse.tracked == 0
    before = dict(bench.values(MISSED))
    bench.apply(*sent[200:])
    missed = bench.values(MISSED)

    assert before["unknown",] > 0
    assert missed["unknown",] > before["unknown",]
    assert missed["cold",] == before["cold",]


def test_an_engine_without_its_tap_loses_the_curve() -> None:
    """Its gauges are of no use to anyone any more."""
    bench = Bench()
    engine = bench.engine()
    bench.apply(*items(100))
    read_curves(bench)
    assert bench.values(HIT_RATIO)
    engine.detach_core()
    read_curves(bench)

    assert not bench.values(HIT_RATIO)
