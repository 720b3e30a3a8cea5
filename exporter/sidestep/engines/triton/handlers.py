"""What each look at Triton's statistics does to a version of a model: what is new is added."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.engines.handlers import Handlers
from sidestep.engines.items import Item
from sidestep.engines.triton.rows import MODEL, SECONDS, STAGES
from sidestep.engines.triton.statistics import NOTHING, BegunAnewError, difference
from sidestep.engines.triton.wire import Batch, ModelStats, Responses, Timed, TritonStats
from sidestep.errors import WireError
from sidestep.metrics.engine import Engine
from sidestep.metrics.field_readers import compile_reader
from sidestep.metrics.registry import Registry

_NEVER, _NO_RESPONSES = Timed(), Responses()
MILLISECONDS = 1000.0
"""Of a second."""


class TritonHandlers(Handlers):
    """Applies them to one registry's engines of the dialect."""

    FED: ClassVar[Collection[str]] = {
        "batch_size", "batch_executions", "batch_duration", "busy_ratio", "instances", "means",
        "memory", "idle", "resets",
    }  # fmt: skip

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        self._read = compile_reader(layout, registry, ModelStats)
        hook = layout.handled
        self._executions, self._duration, self._memory = (
            hook[name].slots[0] for name in ("batch_executions", "batch_duration", "memory")
        )
        self._sizes = hook["batch_size"].slots[0]
        self._busy, self._instances, self._idle, self._resets = (
            hook[name].slots[0] for name in ("busy_ratio", "instances", "idle", "resets")
        )
        self._means = hook["means"].slots[: len(STAGES)]
        self._begun = [
            assignment for assignment in layout.assignments if assignment.row.shared == MODEL
        ]

    def apply(self, engine: Engine, item: Item) -> None:
        """Add what ``item`` has over the look before it.

        Raises:
            WireError: Another dialect's item, or an engine that is no version of a model.
        """
        if not isinstance(item, TritonStats):
            raise WireError("bad_item", "an item of another dialect")
        before = engine.statistics
        if before is None and not engine.labels.keys() >= set(MODEL):
            raise WireError("bad_label", f"{engine.id} is no version of a model")
        if before is not None and item.stamp < before.stamp and item.wall < before.wall:
            # Somebody else has looked since.
            return
        engine.statistics, engine.absent = item, item.stats is None
        if item.stats is not None:
            engine.gauge_stamp = item.stamp
            if before is not None and item.stats == before.stats:
                self._rest(engine, item)
            else:
                self._look(engine, item, item.stats, before)

    def _look(
        self, engine: Engine, item: TritonStats, stats: ModelStats, before: TritonStats | None
    ) -> None:
        known = None if before is None else before.stats
        if known is None:
            self._begin(engine)
        try:
            new = difference(stats, known or NOTHING)
        except BegunAnewError:
            new, known = stats, None
        if before is not None and known is None:
            engine.values[self._resets] = (engine.values[self._resets] or 0) + 1
        self._read(engine, new, True)
        if new.batch_stats:
            self._count(engine, new.batch_stats)
        self._measure(engine, item, 0.0 if before is None else before.stamp, new)

    def _begin(self, engine: Engine) -> None:
        """Show at 0 what any version of a model has, and what this one does."""
        for assignment in self._begun:
            if not assignment.row.feature or assignment.row.feature in engine.features:
                engine.start_family(assignment)

    def _count(self, engine: Engine, batches: tuple[Batch, ...]) -> None:
        """Add executions by the size of their batch."""
        histogram, refused = engine.histogram(self._sizes), 0
        executions, duration = engine.keyed[self._executions], engine.keyed[self._duration]
        for batch in batches:
            refused += histogram.observe_run(batch.batch_size, batch.count)
            key = self.registry.capped(executions, (str(batch.batch_size),))
            executions[key] = executions.get(key, 0) + batch.count
            duration[key] = duration.get(key, 0) + batch.ns
        if refused:
            slot = engine.layout.handled["refused_observations"].slots[0]
            engine.values[slot] = (engine.values[slot] or 0) + refused

    def _rest(self, engine: Engine, item: TritonStats) -> None:
        """Nothing has ended since the look before."""
        values = engine.values
        for slot in self._means:
            values[slot] = None
        if item.stats is not None:
            self._state(engine, item, item.stats, 0.0 if item.instances else None)

    def _measure(self, engine: Engine, item: TritonStats, stamp: float, new: ModelStats) -> None:
        """Gauges of what has ended since the look at ``stamp``, if there was any."""
        values = engine.values
        for slot, timed in zip(self._means, _stages(new), strict=True):
            values[slot] = timed.ns / SECONDS / timed.count if stamp and timed.count else None
        passed = item.stamp - stamp if stamp else 0.0
        is_known = passed > 0 and item.instances
        share = new.busy_ns / SECONDS / passed / item.instances if is_known else None
        self._state(engine, item, new, share)

    def _state(
        self, engine: Engine, item: TritonStats, stats: ModelStats, share: float | None
    ) -> None:
        """Gauges of what is."""
        values = engine.values
        values[self._busy] = share
        values[self._instances] = item.instances or None
        last = stats.last_inference / MILLISECONDS
        values[self._idle] = max(item.wall - last, 0.0) if last else None
        children = engine.keyed[self._memory]
        if children or stats.memory_usage:
            children.clear()
            for memory in stats.memory_usage:
                key = self.registry.capped(children, (str(memory.id), memory.type))
                children[key] = children.get(key, 0) + memory.byte_size


def _stages(new: ModelStats) -> tuple[Timed, ...]:
    """By ``STAGES``."""
    stats, responses = new.inference_stats, new.response_stats or _NO_RESPONSES
    executed = Timed(sum(batch.count for batch in new.batch_stats), new.busy_ns)
    return (
        stats.success,
        stats.fail,
        stats.queue,
        stats.compute_input,
        stats.compute_infer,
        stats.compute_output,
        stats.cache_hit or _NEVER,
        stats.cache_miss or _NEVER,
        executed,
        responses.first,
        responses.next,
    )
