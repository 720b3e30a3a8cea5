"""An item into updates, by the plan. No I/O, no clock: time comes in with the item."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

from sidestep.errors import CatalogueError, WireError
from sidestep.histogram import Histogram
from sidestep.plan import OTHER, Layout, Placed, Section, reader
from sidestep.registry import MAX_OPEN_FAMILIES, Engine, OpenFamily, Registry
from sidestep.wire.items import (
    Family,
    Item,
    Sample,
    Samples,
    VllmRejection,
    VllmSleep,
    VllmStep,
)
from sidestep.wire.limits import is_printable
from sidestep.wire.vllm import CacheStats, IterationStats, SchedulerStats


class Applier:
    """Applies items to a registry's engines."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._steps = {
            dialect: _Reads(layout.root, layout, registry)
            for dialect, layout in registry.layouts.items()
        }
        self._vllm = {
            dialect: _VllmHooks(layout, registry) for dialect, layout in registry.layouts.items()
        }

    def apply(self, engine: Engine, item: Item) -> None:
        """Add ``item`` to ``engine``'s series.

        Raises:
            WireError: The item contradicts the catalogue; nothing was changed.
        """
        dialect = engine.layout.dialect
        match item:
            case VllmStep(more=True):
                self._steps[dialect].run(engine, item, fresh=False)
            case VllmStep():
                fresh = item.stamp >= engine.gauge_stamp and item.scheduler is not None
                self._steps[dialect].run(engine, item, fresh=fresh)
                self._vllm[dialect].step(engine, item, fresh=fresh)
                if fresh:
                    engine.gauge_stamp = item.stamp
                engine.wall = max(engine.wall, item.wall)
            case Samples():
                self._samples(engine, item)
            case VllmSleep():
                self._vllm[dialect].sleep(engine, item)
            case VllmRejection():
                self._vllm[dialect].reject(engine, item)
        self.registry.version += 1

    def _samples(self, engine: Engine, item: Samples) -> None:
        """Families that describe themselves; all are checked before any is added."""
        targets = [(self._family(engine, family), family) for family in item.families]
        for target, family in targets:
            _check_samples(target, family)
        for target, family in targets:
            engine.open.setdefault(target.name, target)
            for sample in family.samples:
                key = self.registry.capped(target.children, tuple(sample.labels))
                _add_sample(target, key, sample)

    def _family(self, engine: Engine, family: Family) -> OpenFamily:
        """The family to add to: the engine's own by now, the catalogue's, or a new one."""
        known = engine.open.get(family.name)
        if known is not None:
            return known
        row = engine.layout.sampled.get(family.name)
        if row is not None:
            return engine.sampled(row)
        if family.name.startswith("sidestep_") or any(
            placed.row.name == family.name for placed in engine.layout.placed
        ):
            raise WireError("owned_family", family.name)
        if len(engine.open) >= MAX_OPEN_FAMILIES:
            raise WireError("over_limit", "too many self-described families")
        labels = tuple(family.labels)
        return OpenFamily(family.name, family.kind, family.help, labels, tuple(family.bounds))


def _check_samples(target: OpenFamily, family: Family) -> None:
    """Whether ``family`` may be added to ``target``.

    Raises:
        WireError: Another kind, other labels or bounds, or what cannot be exposed.
    """
    if (family.kind, tuple(family.labels)) != (target.kind, target.labels):
        raise WireError("changed_family", family.name)
    if family.kind == "histogram" and not target.bounds:
        raise WireError("bad_bounds", family.name)
    if (family.kind == "counter") != family.name.endswith("_total"):
        raise WireError("bad_family", f"{family.name}: counters, and they alone, end in _total")
    for sample in family.samples:
        if len(sample.labels) != len(target.labels) or not all(map(is_printable, sample.labels)):
            raise WireError("bad_label", family.name)
        if family.kind == "counter" and sample.value < 0:
            raise WireError("negative_counter", family.name)
        if sample.counts and (
            len(sample.counts) != len(target.bounds) + 1
            or tuple(family.bounds) not in ((), target.bounds)
        ):
            raise WireError("bad_bounds", family.name)


def _add_sample(target: OpenFamily, key: tuple[str, ...], sample: Sample) -> None:
    if target.kind == "histogram":
        child = target.children.get(key)
        if not isinstance(child, Histogram):
            child = target.children[key] = Histogram(target.bounds)
        child.observe_many(sample.observations)
        if sample.counts:
            child.add(sample.counts, sample.total)
    elif target.kind == "gauge":
        target.children[key] = sample.value
    else:
        before = target.children.get(key, 0)
        target.children[key] = (0 if isinstance(before, Histogram) else before) + sample.value


class _Reads:
    """A section, ready to run: attributes are read several at a time."""

    def __init__(self, section: Section, layout: Layout, registry: Registry) -> None:
        self.registry = registry
        self.refused = layout.hooks["refused_observations"].slots[0]
        self.gauges = _pairs(section.gauges)
        self.counters = _pairs(section.counters)
        self.single = _pairs(section.single)
        self.lists = _pairs(section.lists)
        self.columns = section.columns
        self.codes = section.codes
        self.tallies = section.tallies
        self.section = section
        self.shown = section.shown
        self.parts = [
            (name.removesuffix("[]"), name.endswith("[]"), _Reads(part, layout, registry))
            for name, part in section.parts.items()
        ]

    def run(self, engine: Engine, source: Any, *, fresh: bool) -> None:  # noqa: C901, PLR0912 - one pass, the hot path
        """Add what ``source`` holds; its gauges only where they are ``fresh``."""
        values = engine.values
        self.show(engine)
        if fresh and self.gauges:
            read, slots = self.gauges
            for slot, value in zip(slots, read(source), strict=True):
                values[slot] = value
        if self.counters:
            read, slots = self.counters
            for slot, value in zip(slots, read(source), strict=True):
                if value:
                    values[slot] = (values[slot] or 0) + value
        if self.lists:
            read, slots = self.lists
            for slot, observed in zip(slots, read(source), strict=True):
                if observed:
                    self.refuse(engine, engine.histogram(slot).observe_many(observed))
        if self.single:
            read, slots = self.single
            for slot, value in zip(slots, read(source), strict=True):
                self.refuse(engine, engine.histogram(slot).observe(value))
        for name, placed in self.tallies:
            self.tally(engine, placed, getattr(source, name), fresh=fresh)
        for name, many, part in self.parts:
            below = getattr(source, name)
            if many and below:
                part.run_column(engine, below)
            elif below is not None and not many:
                part.run(engine, below, fresh=fresh)

    def run_column(self, engine: Engine, sources: list[Any]) -> None:
        """Add a list of structs, field by field."""
        self.show(engine)
        for name, nested, slot in self.columns:
            found = [getattr(source, name) for source in sources]
            column = list(chain.from_iterable(found)) if nested else found
            known = [value for value in column if value is not None]
            if known:
                self.refuse(engine, engine.histogram(slot).observe_many(known))
        for name, placed in self.codes:
            last = len(placed.slots) - 1
            for source in sources:
                slot = placed.slots[min(getattr(source, name), last)]
                engine.values[slot] = (engine.values[slot] or 0) + 1

    def show(self, engine: Engine) -> None:
        """An option's families appear together, with the first struct that only it sends."""
        if self.shown and self.section not in engine.seen:
            engine.seen.add(self.section)
            for placed in self.shown:
                engine.show(placed)

    def refuse(self, engine: Engine, count: int) -> None:
        """Count observations that were left out."""
        if count:
            engine.values[self.refused] = (engine.values[self.refused] or 0) + count

    def tally(
        self, engine: Engine, placed: Placed, found: dict[str, int] | list[int], *, fresh: bool
    ) -> None:
        """Add a dict by label value, or a list by position."""
        if isinstance(found, list):
            found = {str(position): count for position, count in enumerate(found)}
        row = placed.row
        if row.closed:
            if fresh:
                for slot, value in zip(placed.slots, row.closed, strict=False):
                    engine.values[slot] = found.get(value, 0)
            return
        children = engine.keyed[placed.slots[0]]
        for value, count in found.items():
            key = self.registry.capped(children, (value,))
            children[key] = children.get(key, 0) + count


def _pairs(
    fields: list[tuple[str, int]],
) -> tuple[Callable[[Any], tuple[Any, ...]], tuple[int, ...]] | None:
    if not fields:
        return None
    return reader([name for name, _ in fields]), tuple(slot for _, slot in fields)


class _VllmHooks:
    """What one field does not decide."""

    FED: ClassVar = {
        "cached_by_source", "cudagraph_padding", "cudagraph_tokens", "iteration_tokens", "lora",
        "lora_requests", "refused_observations", "rejection", "sleep_state",
    }  # fmt: skip

    def __init__(self, layout: Layout, registry: Registry) -> None:
        self.registry = registry
        hook = layout.hooks
        if set(hook) != self.FED:
            raise CatalogueError(f"hooks without a function or a row: {set(hook) ^ self.FED}")
        self.iteration_tokens = hook["iteration_tokens"].slots[0]
        self.cached_by_source = hook["cached_by_source"]
        self.sleep_state = hook["sleep_state"]
        self.rejection = hook["rejection"]
        self.cudagraph_tokens = hook["cudagraph_tokens"]
        self.cudagraph_padding = hook["cudagraph_padding"]
        self.lora_requests = hook["lora_requests"].slots[0]
        self.lora = hook["lora"].slots[0]

    def step(self, engine: Engine, item: VllmStep, *, fresh: bool) -> None:
        """After the plain fields of a step."""
        if item.iteration is not None:
            self.count_tokens(engine, item.iteration, last=item.scheduler is not None)
        if item.mm_cache is not None:
            _observe_hits(engine, item.mm_cache, "mm_hits")
        if item.scheduler is not None:
            self.scheduler(engine, item.scheduler, item.wall, fresh=fresh)

    def count_tokens(self, engine: Engine, iteration: IterationStats, *, last: bool) -> None:
        """Observe ``iteration_tokens_total`` once per engine step that had output.

        With several API servers each sees a slice of the step and one of them,
        by the scheduler's stats, the step itself. Sum and count are exact at any
        moment; a slice that arrives after its step's own falls into the bucket
        of the next step.
        """
        tokens = iteration.iteration_tokens
        histogram = engine.histogram(self.iteration_tokens)
        if not last:
            engine.held_tokens += tokens
            histogram.sum += tokens
            histogram.cache = None
            return
        histogram.observe(tokens + engine.held_tokens)
        histogram.sum -= engine.held_tokens
        engine.held_tokens = 0

    def scheduler(self, engine: Engine, stats: SchedulerStats, wall: float, *, fresh: bool) -> None:
        """Hit rates, cache tiers, CUDA graphs and LoRA adapters."""
        if stats.prefix_cache_stats is not None:
            _observe_hits(engine, stats.prefix_cache_stats, "prefix_hits")
            self.add(engine, self.cached_by_source, "device", stats.prefix_cache_stats.hits)
        external = stats.connector_prefix_cache_stats
        if external is not None:
            _observe_hits(engine, external, "external_hits")
            for tier, tokens in external.hits_by_source.items():
                self.add(engine, self.cached_by_source, tier, tokens)
        graph = stats.cudagraph_stats
        if graph is not None:
            self.add(engine, self.cudagraph_tokens, graph.runtime_mode, graph.num_unpadded_tokens)
            self.add(engine, self.cudagraph_padding, graph.runtime_mode, graph.num_paddings)
        if fresh:
            self.adapters(engine, stats, wall)

    def adapters(self, engine: Engine, stats: SchedulerStats, wall: float) -> None:
        """The current LoRA adapters, and none from before."""
        by_state = {"running": stats.running_lora_adapters, "waiting": stats.waiting_lora_adapters}
        requests = engine.keyed[self.lora_requests]
        combination = engine.keyed[self.lora]
        if not any(by_state.values()):
            requests.clear()
            combination.clear()
            return
        now = {
            (adapter, state): count
            for state, adapters in by_state.items()
            for adapter, count in adapters.items()
        }
        for gone in requests.keys() - now.keys():
            del requests[gone]
        for key, count in now.items():
            kept = self.registry.capped(requests, key)
            requests[kept] = count + (requests.get(kept, 0) if OTHER in kept else 0)
        max_lora = engine.info.get("lora", {}).get("max_lora", "")
        combination.clear()
        running, waiting = (",".join(adapters) for adapters in by_state.values())
        combination[(max_lora, running, waiting)] = wall

    def add(self, engine: Engine, placed: Placed, value: str, count: int) -> None:
        """Add to the child whose own label is ``value``."""
        if placed.where == "keyed":
            children = engine.keyed[placed.slots[0]]
            key = self.registry.capped(children, (value,))
            children[key] = children.get(key, 0) + count
            return
        closed: tuple[str, ...] = placed.row.closed
        slot = placed.slots[closed.index(value) if value in closed else len(closed)]
        if count or value in closed:
            engine.values[slot] = (engine.values[slot] or 0) + count

    def sleep(self, engine: Engine, item: VllmSleep) -> None:
        """One of the three states is 1; none at a level the engine does not name."""
        awake, *asleep = self.sleep_state.slots[:-1]
        engine.values[awake] = int(not item.sleep)
        for level, slot in enumerate(asleep, start=1):
            engine.values[slot] = int(bool(item.sleep) and item.level == level)

    def reject(self, engine: Engine, item: VllmRejection) -> None:
        """A request that never reached the engine."""
        self.add(engine, self.rejection, item.reason, 1)


def _observe_hits(engine: Engine, stats: CacheStats, window: str) -> None:
    hits = getattr(engine, window)
    if stats.reset:
        hits.reset()
    if stats.requests:
        hits.add(stats.requests, stats.queries, stats.hits)
