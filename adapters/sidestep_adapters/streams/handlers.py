"""Handlers of an engine's native streams: plain fields, and the content of its prefix cache."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.engines.handlers import Handlers, increase, is_fresh
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Key, Number
from sidestep.metrics.field_readers import compile_reader
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.registry import Registry
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.block_events import FIRST_MEDIUM, CacheChange, CacheEvents
from sidestep.tracking.kv_blocks.cached import CachedBlocks
from sidestep.tracking.kv_blocks.cached import check as check_changes
from sidestep.tracking.kv_blocks.tracker import BlockObservations, CachedObservations
from sidestep_adapters.streams.wire import ForwardPass, LoadStat

BLOCK_COUNTERS = ("kv_refused_blocks", "kv_abandoned_blocks", "kv_unknown_events")
CACHED = "sidestep_kv_cached_block_{}_seconds"


class StreamHandlers(Handlers):
    """Applies items of native streams to the engines of one registry."""

    HANDLED: ClassVar[Collection[str]] = {
        "stored_blocks", "removed_blocks", "cache_clears", "resident_blocks", *BLOCK_COUNTERS,
        "cached_stores", "cached_shortage", "cached_absence",
    }  # fmt: skip

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        read_pass = compile_reader(layout, registry, ForwardPass)
        read_load = compile_reader(layout, registry, LoadStat)
        self._slots = {name: layout.handler_slot(name) for name in self.HANDLED}
        self._refused = layout.handler_slot("refused_observations")
        self.appliers = {
            CacheEvents: self._cache,
            ForwardPass: lambda engine, item: read_pass(engine, item, is_fresh(engine, item.stamp)),
            LoadStat: lambda engine, item: read_load(engine, item, is_fresh(engine, item.stamp)),
        }

    def observe_blocks(self, engine: Engine, found: BlockObservations) -> None:
        """Add what was observed of cached blocks."""
        counts = found.refused, found.abandoned, found.unknown
        for name, count in zip(BLOCK_COUNTERS, counts, strict=True):
            if count:
                increase(engine, self._slots[name], count)
        if found.refused:
            self.registry.refused_blocks[engine.id] += found.refused
        for medium, cached in found.cached.items():
            self._observe_medium(engine, medium, cached)
        if found.stores:
            stores = sum(count for _, count in found.stores)
            increase(engine, self._slots["cached_stores"], stores)
            again = [one for one in found.stores if math.isfinite(one[0])]
            for name, observations in (("shortage", again), ("absence", found.absences)):
                histogram = engine.histogram(self._slots[f"cached_{name}"])
                refused = histogram.observe_weighted(observations)
                increase(engine, self._refused, refused)

    def abandon_blocks(self, engine: Engine) -> None:
        """Stop tracking all block hashes, since their events were folded."""
        trackers = engine.part(Trackers)
        if trackers.blocks is not None:
            if trackers.blocks.tracked:
                abandoned = self._slots["kv_abandoned_blocks"]
                increase(engine, abandoned, trackers.blocks.tracked)
            trackers.blocks = None
        self._resident(engine).clear()

    def _cache(self, engine: Engine, item: CacheEvents) -> None:
        if engine.part(Trackers).blocks is None:
            # Reject a malformed item before the registry creates a tracker for it.
            check_changes(item.changes)
        observed = self.registry.blocks_of(engine, CachedBlocks).apply(item)
        for change in item.changes:
            self._count(engine, change)
        self._correct(engine, observed.surplus)
        self.observe_blocks(engine, observed)

    def _count(self, engine: Engine, change: CacheChange) -> None:
        """Count blocks by medium; resident ones only once the cache is known to have been empty."""
        resident = self._resident(engine)
        match change.kind:
            case "stored" | "removed":
                children = engine.keyed[self._slots[f"{change.kind}_blocks"]]
                key = self.registry.capped(children, (change.medium,))
                children[key] = children.get(key, 0) + len(change.hashes)
                if resident:
                    key = self.registry.capped(resident, key)
                    more = len(change.hashes) if change.kind == "stored" else -len(change.hashes)
                    resident[key] = resident.get(key, 0) + more
            case "cleared":
                increase(engine, self._slots["cache_clears"], 1)
                _empty(resident, change.medium)
            case "begun":
                resident.clear()
                _empty(resident, "")
            case "lost":
                resident.clear()

    def _correct(self, engine: Engine, surplus: Mapping[str, int]) -> None:
        """Count each resident hash once, as far as the sample shows which were stored or removed twice.

        Engines miss some events: a block that was freed silently is stored again, one that was never
        announced is removed. A block that two requests store at the same time is announced and removed
        twice as well; both are in the sample or neither, so that no error remains.
        """
        resident = self._resident(engine)
        for medium, count in surplus.items():
            key = self.registry.capped(resident, (medium,))
            if key in resident:
                resident[key] -= count
        for key, blocks in resident.items():
            resident[key] = max(blocks, 0)

    def _resident(self, engine: Engine) -> dict[Key, Number]:
        return engine.keyed[self._slots["resident_blocks"]]

    def _observe_medium(self, engine: Engine, medium: str, observed: CachedObservations) -> None:
        found = observed.lifetimes, observed.idles, observed.gaps
        for name, observations in zip(("lifetime", "idle", "reuse_gap"), found, strict=True):
            row = engine.layout.sampled_rows[CACHED.format(name)]
            family = engine.open_families.setdefault(row.name, engine.new_family(row))
            key = self.registry.capped(family.children, (medium,))
            child = family.children.setdefault(key, engine.new_histogram(family))
            if isinstance(child, Histogram):
                increase(engine, self._refused, child.observe_weighted(observations))


def _empty(resident: dict[Key, Number], medium: str) -> None:
    """Set ``medium`` to 0 blocks; all media where ``medium`` is empty."""
    if not medium:
        for key in resident:
            resident[key] = 0
        resident.setdefault((FIRST_MEDIUM,), 0)
    elif resident:
        resident[medium,] = 0
