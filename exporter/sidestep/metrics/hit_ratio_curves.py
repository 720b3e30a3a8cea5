"""Hit ratios that prefix caches of other sizes would have, read from the engines' curves now and then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Key
from sidestep.metrics.registry import FULL_SHARES, Registry
from sidestep.metrics.trackers import Trackers
from sidestep.tracking.kv_blocks.hit_ratio_curve import HitRatioCurve
from sidestep.tracking.kv_blocks.lookups import HORIZON, CurveSummary, LookupTracker, SharedCache

INTERVAL = 10.0
"""Least seconds between two updates of an engine."""
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Sizes of caches, in sizes of the present one."""
STEPS = 8
"""Sizes to a doubling among which the sufficient one is found."""
WITHIN = 0.01
"""Hit ratio below the best one that is sufficient."""
GIB = 1 << 30
Group = tuple[str, str, int, float]
"""Dialect, model, block size and sample rate of engines that could share a cache."""
HIT_RATIOS = "whatif_hit_ratio"
"""Handler of the hit ratios by size."""


class HitRatioCurves:
    """Updates the summaries of the curves of a registry's engines, one engine a call."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._due: list[Engine] = []
        self._next = float("-inf")
        self._caches: dict[Group, SharedCache] = {}

    def update(self, now: float) -> None:
        """Update the next engine; call it often. ``now`` is in monotonic seconds."""
        for cache in self._caches.values():
            cache.release_abandoned()
        if not self._due:
            if now < self._next:
                return
            self._next = now + INTERVAL
            engines = self._registry.engines.values()
            self._due = [engine for engine in engines if HIT_RATIOS in engine.layout.handled]
            self._share()
            return
        engine = self._due.pop()
        slot = engine.layout.handler_slot(HIT_RATIOS)
        tracker = engine.part(Trackers).lookups
        if tracker is not None:
            tracker.summary = summarise(tracker, self._shared_capacity(tracker.shared))
        summary = None if tracker is None else tracker.summary
        ratios = {} if summary is None else summary.hit_ratios
        found: dict[Key, float] = {(f"{size:g}x",): ratio for size, ratio in ratios.items()}
        if found or engine.keyed[slot]:
            engine.keyed[slot] = dict(found)
            self._registry.touch(engine)

    def _share(self) -> None:
        """Let engines of the same model share a cache, and all of them the memory."""
        tracked = _tracked(self._due)
        groups: defaultdict[Group, list[LookupTracker]] = defaultdict(list)
        for engine in self._due:
            if (one := engine.part(Trackers).lookups) is not None:
                model = engine.labels.get("model_name", "")
                groups[engine.layout.dialect, model, one.block_size, one.rate].append(one)
        settings = self._registry.tracking.lookups
        most = settings.blocks * FULL_SHARES // max(len(tracked) + len(self._caches), 1)
        for one in tracked:
            one.reuse.max_blocks = max(min(settings.blocks, most), 1)
        before = self._caches
        several = {name: group for name, group in groups.items() if len(group) > 1}
        self._caches = {
            name: before.get(name) or SharedCache(settings, group[0].rate)
            for name, group in several.items()
        }
        for name, group in groups.items():
            cache = self._caches.get(name)
            if cache is not None:
                cache.reuse.max_blocks = max(min(settings.blocks, most), 1)
                cache.reuse.horizon = HORIZON * sum(one.capacity for one in group) or None
            for one in group:
                one.share(cache)

    def _shared_capacity(self, cache: SharedCache | None) -> int:
        """Return the blocks of all caches that share; 0: none do, or one of them is unknown."""
        if cache is None:
            return 0
        trackers = _tracked(self._registry.engines.values())
        capacities = [one.capacity for one in trackers if one.shared is cache]
        return sum(capacities) if all(capacities) else 0


def _tracked(engines: Iterable[Engine]) -> list[LookupTracker]:
    found = (engine.part(Trackers).lookups for engine in engines)
    return [tracker for tracker in found if tracker is not None]


def summarise(tracker: LookupTracker, shared_capacity: int) -> CurveSummary | None:
    """Return the curve in a few numbers; None without lookups, or where the size of the cache is unknown."""
    reuse, capacity = tracker.reuse, tracker.capacity
    most = HORIZON.bit_length() - 1
    fine = [capacity * 2.0 ** (step / STEPS) for step in range(-STEPS * 6, STEPS * most + 1)]
    ratios = reuse.curve.hit_ratios([*(capacity * size for size in SIZES), *fine])
    if not capacity or not ratios:
        return None
    shared = None
    if tracker.shared is not None and shared_capacity:
        (shared,) = tracker.shared.reuse.curve.hit_ratios([shared_capacity]) or (None,)
    return CurveSummary(
        dict(zip(SIZES, ratios, strict=False)),
        reuse.used_since(tracker.now - tracker.half_life),
        _sufficient(fine, ratios[len(SIZES) :]),
        _per_gib(tracker, reuse.curve),
        shared,
    )


def _sufficient(capacities: Sequence[float], ratios: Sequence[float]) -> float:
    """Return the least of ``capacities`` with a hit ratio that is sufficient."""
    least = max(ratios) - WITHIN
    return next(c for c, ratio in zip(capacities, ratios, strict=True) if ratio >= least)


def _per_gib(tracker: LookupTracker, curve: HitRatioCurve) -> float | None:
    """Return the slope of the curve between the present size and one a quarter larger."""
    if not tracker.block_bytes:
        return None
    capacity = tracker.capacity
    now, then = curve.hit_ratios([capacity, 1.25 * capacity])
    return (then - now) / (0.25 * capacity * tracker.block_bytes / GIB)
