"""Handlers of Triton's items: each adds what the statistics counted since the previous poll."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.engines.handlers import Handlers, increase
from sidestep.errors import WireError
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Key, Number
from sidestep.metrics.field_readers import compile_reader
from sidestep.metrics.registry import Registry
from sidestep.protocol.limits import MAX_OPEN_VALUES, OTHER
from sidestep_adapters.triton.differences import EMPTY, CountersResetError, difference
from sidestep_adapters.triton.rows import BATCH_STAGES, MODEL, RESPONSE_STAGES, SECONDS, STAGES
from sidestep_adapters.triton.wire import Batch, ModelStats, Responses, Timed, TritonStats

_NEVER, _NO_RESPONSES = Timed(), Responses()
STAGED_SIZES = MAX_OPEN_VALUES // len(BATCH_STAGES) - 1
"""Maximum batch sizes with a series for each stage, so that these and ``__other__`` stay within the limit."""
MILLISECONDS = 1000.0
"""Milliseconds of a second."""


class TritonHandlers(Handlers):
    """Applies Triton's items to the engines of one registry."""

    HANDLED: ClassVar[Collection[str]] = {
        "batch_size", "batch_executions", "batch_duration", "batch_stages", "busy_ratio",
        "instances", "means", "response_stages", "response_durations", "memory", "idle", "resets",
    }  # fmt: skip

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        self._read = compile_reader(layout, registry, ModelStats)
        self._slots = {name: layout.handler_slot(name) for name in self.HANDLED if name != "means"}
        self._means = layout.handled["means"].slots[: len(STAGES)]
        self._model_rows = [
            assignment for assignment in layout.assignments if assignment.row.shared == MODEL
        ]
        self.appliers = {TritonStats: self._stats}

    def _stats(self, engine: Engine, item: TritonStats) -> None:
        """Add what ``item`` counted since the engine's previous item.

        Raises:
            WireError: The engine is no version of a model.
        """
        before = engine.statistics if isinstance(engine.statistics, TritonStats) else None
        if before is None and not engine.labels.keys() >= set(MODEL):
            raise WireError("bad_label", f"{engine.id} is no version of a model")
        if before is not None and item.stamp < before.stamp and item.wall < before.wall:
            # Another poller has sent newer statistics.
            return
        engine.statistics, engine.absent = item, item.absent
        if item.stats is not None:
            engine.gauge_stamp = item.stamp
            if before is not None and item.stats == before.stats:
                self._update_idle(engine, item)
            else:
                self._add_difference(engine, item, item.stats, before)

    def _add_difference(
        self, engine: Engine, item: TritonStats, stats: ModelStats, before: TritonStats | None
    ) -> None:
        known = None if before is None else before.stats
        if known is None:
            self._start_families(engine)
        try:
            new = difference(stats, known or EMPTY)
        except CountersResetError:
            new, known = stats, None
        if before is not None and known is None:
            increase(engine, self._slots["resets"], 1)
        self._read(engine, new, True)
        if new.batch_stats:
            self._add_batches(engine, new.batch_stats)
        if new.response_stats is not None:
            self._add_responses(engine, new.response_stats)
        self._update_interval_gauges(engine, item, 0.0 if before is None else before.stamp, new)

    def _start_families(self, engine: Engine) -> None:
        """Start the families of every model version, and those of this version's features, at 0."""
        for assignment in self._model_rows:
            if not assignment.row.feature or assignment.row.feature in engine.description.features:
                engine.start_family(assignment)

    def _add_batches(self, engine: Engine, batches: tuple[Batch, ...]) -> None:
        """Add executions by the size of their batch."""
        histogram, refused = engine.histogram(self._slots["batch_size"]), 0
        executions = engine.keyed[self._slots["batch_executions"]]
        duration = engine.keyed[self._slots["batch_duration"]]
        stages = engine.keyed[self._slots["batch_stages"]]
        for batch in batches:
            refused += histogram.observe_run(batch.batch_size, batch.count)
            key = self.registry.capped(executions, (str(batch.batch_size),))
            executions[key] = executions.get(key, 0) + batch.count
            duration[key] = duration.get(key, 0) + batch.ns
            size = self._staged_size(stages, str(batch.batch_size))
            for stage, ns in zip(BATCH_STAGES, batch.stage_ns, strict=True):
                stages[size, stage] = stages.get((size, stage), 0) + ns
        if refused:
            increase(engine, engine.layout.handler_slot("refused_observations"), refused)

    def _staged_size(self, stages: Mapping[Key, Number], size: str) -> str:
        """Return ``size``, or ``__other__`` where ``stages`` has enough other sizes."""
        if (size, BATCH_STAGES[0]) in stages or len(stages) < STAGED_SIZES * len(BATCH_STAGES):
            return size
        self.registry.limited["label_values"] += 1
        return OTHER

    def _add_responses(self, engine: Engine, responses: Responses) -> None:
        """Add stages of responses, which start at 0."""
        counts = engine.keyed[self._slots["response_stages"]]
        durations = engine.keyed[self._slots["response_durations"]]
        for position in ("first", "next"):
            for stage in RESPONSE_STAGES:
                timed: Timed = getattr(responses, f"{position}_{stage}")
                key = position, stage
                counts[key] = counts.get(key, 0) + timed.count
                durations[key] = durations.get(key, 0) + timed.ns

    def _update_idle(self, engine: Engine, item: TritonStats) -> None:
        """Update gauges where nothing ended since the previous poll."""
        values = engine.values
        for slot in self._means:
            values[slot] = None
        if item.stats is not None:
            self._update_state_gauges(engine, item, item.stats, 0.0 if item.instances else None)

    def _update_interval_gauges(
        self, engine: Engine, item: TritonStats, stamp: float, new: ModelStats
    ) -> None:
        """Update gauges from what ended since the poll at ``stamp``; 0.0: there was no such poll."""
        values = engine.values
        for slot, timed in zip(self._means, _stages(new), strict=True):
            values[slot] = timed.ns / SECONDS / timed.count if stamp and timed.count else None
        passed = item.stamp - stamp if stamp else 0.0
        is_known = passed > 0 and item.instances
        share = new.busy_ns / SECONDS / passed / item.instances if is_known else None
        self._update_state_gauges(engine, item, new, share)

    def _update_state_gauges(
        self, engine: Engine, item: TritonStats, stats: ModelStats, share: float | None
    ) -> None:
        """Update gauges of the current state."""
        values = engine.values
        values[self._slots["busy_ratio"]] = share
        values[self._slots["instances"]] = item.instances or None
        last = stats.last_inference / MILLISECONDS
        values[self._slots["idle"]] = max(item.wall - last, 0.0) if last else None
        children = engine.keyed[self._slots["memory"]]
        if children or stats.memory_usage:
            children.clear()
            for memory in stats.memory_usage:
                key = self.registry.capped(children, (str(memory.id), memory.type))
                children[key] = children.get(key, 0) + memory.byte_size


def _stages(new: ModelStats) -> tuple[Timed, ...]:
    """Return counts and times in the order of ``STAGES``."""
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
