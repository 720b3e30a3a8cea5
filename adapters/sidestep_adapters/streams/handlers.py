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
from sidestep.tracking.kv_blocks.tracker import BlockObservations, CachedObservations, Observation
from sidestep_adapters.streams.wire import ForwardPass, LoadStat

CACHED = "sidestep_kv_cached_block_{}_seconds"


class StreamHandlers(Handlers):
    """Applies items of native streams to the engines of one registry."""

    HANDLED: ClassVar[Collection[str]] = {
        "stored_blocks", "removed_blocks", "cache_clears", "resident_blocks",
        "kv_refused_blocks", "kv_abandoned_blocks", "kv_unknown_events",
        "cached_stores", "cached_shortage", "cached_absence",
    }  # fmt: skip

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        read_pass = compile_reader(layout, registry, ForwardPass)
        read_load = compile_reader(layout, registry, LoadStat)
        self._stored, self._removed, self._resident = (
            layout.handler_slot(f"{name}_blocks") for name in ("stored", "removed", "resident")
        )
        self._clears = layout.handler_slot("cache_clears")
        self._refused_blocks = layout.handler_slot("kv_refused_blocks")
        self._abandoned = layout.handler_slot("kv_abandoned_blocks")
        self._unknown = layout.handler_slot("kv_unknown_events")
        self._stores, self._shortage, self._absence = (
            layout.handler_slot(f"cached_{name}") for name in ("stores", "shortage", "absence")
        )
        self._refused = layout.handler_slot("refused_observations")
        self.appliers = {
            CacheEvents: self._cache,
            ForwardPass: lambda engine, item: read_pass(engine, item, is_fresh(engine, item.stamp)),
            LoadStat: lambda engine, item: read_load(engine, item, is_fresh(engine, item.stamp)),
        }

    def observe_blocks(self, engine: Engine, found: BlockObservations) -> None:
        """Add what was observed of cached blocks."""
        for slot, count in (
            (self._refused_blocks, found.refused),
            (self._abandoned, found.abandoned),
            (self._unknown, found.unknown),
        ):
            if count:
                increase(engine, slot, count)
        if found.refused:
            self.registry.refused_blocks[engine.id] += found.refused
        for medium, cached in found.cached.items():
            self._observe_medium(engine, medium, cached)
        if found.stores:
            increase(engine, self._stores, sum(count for _, count in found.stores))
            again = [one for one in found.stores if math.isfinite(one[0])]
            for slot, observations in ((self._shortage, again), (self._absence, found.absences)):
                refused = engine.histogram(slot).observe_weighted(observations)
                increase(engine, self._refused, refused)

    def abandon_blocks(self, engine: Engine) -> None:
        """Stop tracking all block hashes, since their events were folded."""
        trackers = engine.part(Trackers)
        if trackers.blocks is not None:
            if trackers.blocks.tracked:
                increase(engine, self._abandoned, trackers.blocks.tracked)
            trackers.blocks = None
        engine.keyed[self._resident].clear()

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
        resident = engine.keyed[self._resident]
        match change.kind:
            case "stored":
                key = self._add(engine, self._stored, change)
                if resident:
                    key = self.registry.capped(resident, key)
                    resident[key] = resident.get(key, 0) + len(change.hashes)
            case "removed":
                key = self._add(engine, self._removed, change)
                if resident:
                    key = self.registry.capped(resident, key)
                    resident[key] = resident.get(key, 0) - len(change.hashes)
            case "cleared":
                increase(engine, self._clears, 1)
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
        resident = engine.keyed[self._resident]
        for medium, count in surplus.items():
            key = self.registry.capped(resident, (medium,))
            if key in resident:
                resident[key] -= count
        for key, blocks in resident.items():
            resident[key] = max(blocks, 0)

    def _add(self, engine: Engine, slot: int, change: CacheChange) -> Key:
        children = engine.keyed[slot]
        key = self.registry.capped(children, (change.medium,))
        children[key] = children.get(key, 0) + len(change.hashes)
        return key

    def _observe_medium(self, engine: Engine, medium: str, observed: CachedObservations) -> None:
        found: Mapping[str, list[Observation]] = {
            "lifetime": observed.lifetimes,
            "idle": observed.idles,
            "reuse_gap": observed.gaps,
        }
        for name, observations in found.items():
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
