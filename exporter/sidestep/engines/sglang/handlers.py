"""The handlers of SGLang's items: a generated reader for plain fields, then the handler rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.engines import lookup_counters
from sidestep.engines.handlers import is_fresh
from sidestep.engines.lookup_counters import LookupCounters
from sidestep.engines.sglang.request_handlers import RequestHandlers
from sidestep.engines.sglang.rows import QUEUES, ROUTING_KEY_BOUNDS, ROUTING_KEYS
from sidestep.engines.sglang.wire import QueueCount, SglangStats
from sidestep.metrics.engine import Engine
from sidestep.metrics.field_readers import compile_reader
from sidestep.metrics.registry import Registry
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.cache_lookups import CacheLookups

TOTAL = ("",)
"""The key for a queue's requests of all priorities."""
_BUCKETS = [
    (str(above), str(upto))
    for above, upto in zip((0, *ROUTING_KEY_BOUNDS), (*ROUTING_KEY_BOUNDS, "+Inf"), strict=True)
]


class SglangHandlers(RequestHandlers):
    """Applies SGLang's items to the engines of one registry."""

    HANDLED: ClassVar[Collection[str]] = {
        *RequestHandlers.HANDLED,
        *(f"queue:{name}" for name in QUEUES),
        *(f"routing_keys:{name}" for name in ROUTING_KEYS),
        *lookup_counters.HANDLERS,
    }

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        self._read = compile_reader(layout, registry, SglangStats)
        self._queues = [(name, layout.handler_slot(f"queue:{name}")) for name in QUEUES]
        self._keys = [(name, layout.handler_slot(f"routing_keys:{name}")) for name in ROUTING_KEYS]
        self.appliers = {
            **self.appliers,
            SglangStats: self._stats,
            CacheLookups: LookupCounters(layout, registry).apply,
        }

    def abandon_blocks(self, engine: Engine) -> None:
        """Forget the blocks of lookups, since later ones do not continue earlier ones."""
        lookups = engine.part(Trackers).lookups
        if lookups is not None:
            lookups.restart()

    def _stats(self, engine: Engine, item: SglangStats) -> None:
        if not is_fresh(engine, item.stamp):
            return
        self._read(engine, item, True)
        for name, slot in self._queues:
            self._queue(engine.keyed[slot], getattr(item.stats, name))
        for name, slot in self._keys:
            counts = getattr(item.stats, name)
            if counts is not None:
                engine.keyed[slot].update(_spread(counts))

    def _queue(
        self, children: dict[tuple[str, ...], int | float], queue: QueueCount | None
    ) -> None:
        if queue is None:
            children.clear()
            return
        # A priority without requests stays at 0, as on SGLang's own page.
        for key in children:
            children[key] = 0
        children[TOTAL] = queue.total
        for priority, count in (queue.by_priority or {}).items():
            key = self.registry.capped(children, (priority,))
            if key != TOTAL:
                children[key] = children.get(key, 0) + count


def _spread(counts: list[int]) -> dict[tuple[str, ...], int]:
    """Return the number of routing keys by how many requests have them, not cumulative."""
    found = dict.fromkeys(_BUCKETS, 0)
    for count in counts:
        found[_BUCKETS[bisect_left(ROUTING_KEY_BOUNDS, count)]] += 1
    return {key: number for key, number in found.items()}  # noqa: C416 - wider keys
