"""Lookups of engines: reasons of misses, lost history and limits."""

from __future__ import annotations

import pytest

from sidestep.errors import WireError
from sidestep.protocol.cache_lookups import (
    CacheLookups,
    Cleared,
    Lookup,
    LookupEvent,
    Released,
)
from sidestep.tracking.kv_blocks import lookups
from sidestep.tracking.kv_blocks.lookups import (
    LookupSettings,
    LookupTracker,
    SharedCache,
    check,
)

HALF_LIFE = 100.0


def item(*events: LookupEvent, before: int = 0, source: int = 1, **more: float) -> CacheLookups:
    """Return an item of a cache of 100 blocks of 16 tokens, all of which are sampled."""
    fields = {"rate": 1.0, "block_size": 16, "capacity": 100, **more}
    return CacheLookups(
        0,
        1.0,
        source,
        fields["rate"],
        int(fields["block_size"]),
        before,
        int(fields["capacity"]),
        0,
        [*events],
    )


def ask(request: int, stamp: float, *keys: int, found: int = 0, tokens: int = 0) -> Lookup:
    """Return a lookup of blocks; by default of a prompt with one token more."""
    return Lookup(
        request,
        stamp,
        tokens or 16 * len(keys) + 1,
        len(keys),
        found,
        sampled=[*keys],
        sampled_found=found,
    )


def tracker() -> LookupTracker:
    """Return a tracker."""
    return LookupTracker(LookupSettings(HALF_LIFE))


def reasons(missed: dict[str, int]) -> dict[str, int]:
    """Return the reasons that have tokens."""
    return {reason: tokens for reason, tokens in missed.items() if tokens}


def test_missed_tokens_have_their_reason() -> None:
    """A first use is cold, a block from before a reset cleared, and another one evicted."""
    ours = tracker()
    first = ours.apply(item(ask(1, 1.0, 1, 2, 3), Released(1, 2.0, 3)))
    again = ours.apply(item(ask(2, 5.0, 1, 2, found=1), Released(2, 6.0, 2), before=1))
    cleared = ours.apply(item(Cleared(7.0), ask(3, 9.0, 1, 4), Released(3, 10.0, 2), before=2))

    assert reasons(first.missed) == {"cold": 48, "too_short": 1}
    assert reasons(again.missed) == {"evicted": 16, "too_short": 1}
    assert again.evicted == [(3.0, 1)]
    assert reasons(cleared.missed) == {"cleared": 16, "cold": 16, "too_short": 1}


def test_what_was_not_seen_is_unknown_for_a_half_life() -> None:
    """A block that an exporter does not know may have been used before it started."""
    ours = tracker()
    early = ours.apply(item(ask(1, 10.0, 1), Released(1, 11.0, 1), before=7))
    late = ours.apply(item(ask(2, 1.0 + HALF_LIFE, 2), Released(2, 200.0, 1), before=8))

    assert reasons(early.missed) == {"unknown": 16, "too_short": 1}
    assert reasons(late.missed) == {"cold": 16, "too_short": 1}


def test_a_new_source_forgets_the_blocks_but_not_the_curve() -> None:
    """Distances of before stay, and blocks of before are unknown."""
    ours = tracker()
    ours.apply(
        item(ask(1, 1.0, 1), Released(1, 2.0, 1), ask(2, 3.0, 1, found=1), Released(2, 4.0, 1))
    )
    (before,) = ours.reuse.curve.hit_ratios([1])
    found = ours.apply(item(ask(1, 5.0, 1), source=2, before=2))

    assert before == pytest.approx(16 / 34, rel=0.02)
    assert reasons(found.missed) == {"unknown": 16, "too_short": 1}
    assert ours.reuse.tracked == 1
    assert ours.reuse.curve.hit_ratio == pytest.approx(16 / 51, rel=0.05)


def test_ends_that_never_come_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that only begins requests loses their blocks, those in a shared cache included."""
    monkeypatch.setattr(lookups, "MAX_HELD_KEYS", 1000)
    ours, shared = tracker(), SharedCache(LookupSettings(HALF_LIFE), 1.0)
    ours.share(shared)
    for number in range(300):
        keys = range(number * 10, number * 10 + 10)
        ours.apply(item(ask(number, 1.0, *keys), before=number))
        assert sum(map(len, ours._keys.values())) <= 1000
        assert ours.reuse.tracked <= 1000
        assert len(shared.reuse._held) <= 2 * 1000 + 10


def test_long_requests_release_their_blocks_in_parts() -> None:
    """The last ones go first, as an engine evicts them first."""
    ours = tracker()
    ours.apply(item(ask(1, 1.0, *range(10)), Released(1, 2.0, 4), before=0))
    held = {*ours.reuse._held}
    ours.apply(item(Released(1, 3.0, 6, [20]), before=1))

    assert held == {*range(6)}
    assert not ours.reuse._held
    assert not ours._keys
    assert ours.reuse.used_since(3.0) == 7


def test_a_clock_that_runs_behind_does_not_stop_the_curve() -> None:
    """An engine continues on a host that was started later: its lookups count as much as others."""
    ours = tracker()
    for number in range(50):
        stamp = 1e6 + number
        ours.apply(item(ask(number, stamp, 1, found=1), Released(number, stamp, 1), before=number))
    for number in range(50):
        stamp = 1.0 + 10 * HALF_LIFE * number
        again = item(
            ask(number, stamp, number + 2), Released(number, stamp, 1), source=2, before=99
        )
        ours.apply(again)
    ratio = ours.reuse.curve.hit_ratio

    assert ratio is not None
    assert ratio < 0.001


def test_blocks_beyond_eight_caches_are_forgotten() -> None:
    """The memory follows the size of the cache."""
    ours = tracker()
    for number in range(500):
        keys = range(number * 100, number * 100 + 100)
        ours.apply(item(ask(number, 1.0, *keys), Released(number, 2.0, 100), before=number))

    assert ours.reuse.tracked < 8 * 100 + 2 * 2048


@pytest.mark.parametrize(
    "wrong",
    [
        item(rate=0.0),
        item(ask(1, 1.0, 1, found=2)),
        item(Lookup(1, 1.0, 32, 1, hot_blocks=2)),
        item(Lookup(1, 1.0, found=1000)),
        item(Lookup(1, 1.0, 32, 1, sampled=[1], sampled_found=2)),
        item(Lookup(1, 1.0, 32, 1, sampled=[1], sampled_hot=2)),
        item(ask(1, 1.0, *range(300)), ask(2, 1.0, *range(300))),
        item(Released(1, 1.0, 300), Released(2, 1.0, 0, [*range(300)])),
    ],
)
def test_items_that_contradict_themselves_are_refused(wrong: CacheLookups) -> None:
    """Before anything of them is applied."""
    with pytest.raises(WireError):
        check(wrong)
