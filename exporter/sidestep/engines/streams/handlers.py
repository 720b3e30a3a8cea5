"""The handlers of an engine's native streams: plain fields, and the content of its prefix cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.engines.handlers import Handlers
from sidestep.engines.items import Item
from sidestep.engines.streams.wire import ForwardPass, LoadStat
from sidestep.errors import WireError
from sidestep.metrics.engine import Engine, Key, Number
from sidestep.metrics.field_readers import compile_reader
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.registry import Registry
from sidestep.protocol.block_events import FIRST_MEDIUM, CacheChange, CacheEvents
from sidestep.tracking.kv_blocks.cached import check as check_changes
from sidestep.tracking.kv_blocks.tracker import CachedLives, Lives, Observation

CACHED = "sidestep_kv_cached_block_{}_seconds"


class StreamHandlers(Handlers):
    """Applies items of native streams to the engines of one registry."""

    HANDLED: ClassVar[Collection[str]] = {
        "stored_blocks", "removed_blocks", "cache_clears", "resident_blocks",
        "kv_sample_halvings", "kv_abandoned_blocks", "kv_unknown_events",
    }  # fmt: skip

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        self._read_pass = compile_reader(layout, registry, ForwardPass)
        self._read_load = compile_reader(layout, registry, LoadStat)
        handled = layout.handled
        self._stored, self._removed, self._resident = (
            handled[f"{name}_blocks"].slots[0] for name in ("stored", "removed", "resident")
        )
        self._clears = handled["cache_clears"].slots[0]
        self._halvings, self._abandoned, self._unknown, self._refused = (
            handled[name].slots[0]
            for name in (
                "kv_sample_halvings",
                "kv_abandoned_blocks",
                "kv_unknown_events",
                "refused_observations",
            )
        )

    def apply(self, engine: Engine, item: Item) -> None:
        """Add ``item`` to ``engine``'s series.

        Raises:
            WireError: The item contradicts the catalogue or itself; nothing was changed.
        """
        match item:
            case CacheEvents():
                self._cache(engine, item)
            case ForwardPass():
                self._read_pass(engine, item, _is_fresh(engine, item.stamp))
            case LoadStat():
                self._read_load(engine, item, _is_fresh(engine, item.stamp))
            case _:
                raise WireError("bad_item", "an item of another dialect")

    def observe_lifetimes(self, engine: Engine, lifetimes: Lives) -> None:
        """Observe lifetimes of block hashes that ended."""
        for slot, count in (
            (self._halvings, lifetimes.halvings),
            (self._abandoned, lifetimes.abandoned),
            (self._unknown, lifetimes.unknown),
        ):
            _increase(engine, slot, count)
        for medium, cached in lifetimes.cached.items():
            self._observe_cached(engine, medium, cached)

    def abandon_blocks(self, engine: Engine) -> None:
        """Stop tracking all block hashes, since their events were folded."""
        if engine.blocks is not None:
            _increase(engine, self._abandoned, engine.blocks.tracked)
            engine.blocks = None
        engine.keyed[self._resident].clear()

    def _cache(self, engine: Engine, item: CacheEvents) -> None:
        if engine.blocks is None:
            # Reject a malformed item before the registry creates a tracker for it.
            check_changes(item.changes)
        lifetimes = self.registry.blocks_of(engine).cache(item)
        for change in item.changes:
            self._count(engine, change)
        self.observe_lifetimes(engine, lifetimes)

    def _count(self, engine: Engine, change: CacheChange) -> None:
        """Count blocks by medium; resident blocks are known once the cache has been empty.

        A block that two requests store at the same time is announced twice and removed twice, so
        the difference is exact where a set of hashes would not be.
        """
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
                    left = resident.get(key, 0) - len(change.hashes)
                    if left < 0:
                        # More were removed than known: the count of resident blocks is unknown.
                        resident.clear()
                    else:
                        resident[key] = left
            case "cleared":
                _increase(engine, self._clears, 1)
                _empty(resident, change.medium)
            case "begun":
                resident.clear()
                _empty(resident, "")
            case "lost":
                resident.clear()

    def _add(self, engine: Engine, slot: int, change: CacheChange) -> Key:
        children = engine.keyed[slot]
        key = self.registry.capped(children, (change.medium,))
        children[key] = children.get(key, 0) + len(change.hashes)
        return key

    def _observe_cached(self, engine: Engine, medium: str, lifetimes: CachedLives) -> None:
        found: Mapping[str, list[Observation]] = {
            "lifetime": lifetimes.lifetimes,
            "idle": lifetimes.idles,
            "reuse_gap": lifetimes.gaps,
        }
        for name, observations in found.items():
            row = engine.layout.sampled_rows[CACHED.format(name)]
            family = engine.open_families.setdefault(row.name, engine.new_family(row))
            key = self.registry.capped(family.children, (medium,))
            child = family.children.setdefault(key, engine.new_histogram(family))
            if isinstance(child, Histogram):
                _increase(engine, self._refused, child.observe_weighted(observations))


def _is_fresh(engine: Engine, stamp: float) -> bool:
    """Return whether ``stamp`` is not older than the engine's gauges; if so, update their stamp."""
    if stamp < engine.gauge_stamp:
        return False
    engine.gauge_stamp = stamp
    return True


def _empty(resident: dict[Key, Number], medium: str) -> None:
    """Set ``medium`` to 0 blocks; all media where ``medium`` is empty."""
    if not medium:
        for key in resident:
            resident[key] = 0
        resident.setdefault((FIRST_MEDIUM,), 0)
    elif resident:
        resident[medium,] = 0


def _increase(engine: Engine, slot: int, amount: int) -> None:
    if amount:
        engine.values[slot] = (engine.values[slot] or 0) + amount
