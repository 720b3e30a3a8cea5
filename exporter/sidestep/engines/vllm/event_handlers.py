"""Handlers for those values of request and block events that are no plain fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.tracking.kv_blocks.tracker import Lives
from sidestep.tracking.requests.outcomes import Outcomes


class EventHandlers:
    """The functions that feed the handler rows of ``core_rows``, for one layout."""

    HANDLED: ClassVar = {
        "kv_abandoned_blocks", "kv_block_gaps", "kv_block_reset_ages", "kv_block_reset_idles",
        "kv_block_reuses", "kv_cache_resets", "kv_sample_halvings", "kv_unknown_events",
        "longest_preemption", "requests_by_state",
        "refused_requests", "untracked_requests",
    }  # fmt: skip

    def __init__(self, layout: Layout, registry: Registry) -> None:
        self.registry = registry
        handled = layout.handled
        self.states = handled["requests_by_state"].slots
        self.longest = handled["longest_preemption"].slots[0]
        self.refused = handled["refused_requests"]
        self.untracked = handled["untracked_requests"]
        self.omitted = handled["refused_observations"].slots[0]
        self.iteration_tokens = handled["iteration_tokens"].slots[0]
        self.resets = handled["kv_cache_resets"].slots[0]
        self.halvings = handled["kv_sample_halvings"].slots[0]
        self.abandoned = handled["kv_abandoned_blocks"].slots[0]
        self.unknown = handled["kv_unknown_events"].slots[0]
        self.lifetimes, self.idles, self.last_gaps = (
            layout.find(f"vllm:kv_block_{name}_seconds").slots[0]
            for name in ("lifetime", "idle_before_evict", "reuse_gap")
        )
        self.gaps, self.reuses, self.reset_ages, self.reset_idles = (
            handled[f"kv_block_{name}"].slots[0]
            for name in ("gaps", "reuses", "reset_ages", "reset_idles")
        )

    def requests(self, engine: Engine, outcomes: Outcomes) -> None:
        """Apply the outcomes of request events, after their plain fields."""
        histogram = engine.histogram(self.iteration_tokens)
        refused = sum(histogram.observe(tokens) for tokens in outcomes.iteration_tokens)
        if refused:
            _increase(engine, self.omitted, refused)
        for reason, count in outcomes.refused.items():
            self.registry.add(engine, self.refused, reason, count)
        self.untracked_requests(engine, outcomes.untracked)
        self.registry.limited["label_values"] += outcomes.limited
        if outcomes.omitted:
            _increase(engine, self.omitted, outcomes.omitted)

    def untracked_requests(self, engine: Engine, found: Mapping[str, int]) -> None:
        """Count requests whose intervals cannot all be known, by reason."""
        for reason, count in found.items():
            self.registry.add(engine, self.untracked, reason, count)

    def abandon_blocks(self, engine: Engine) -> None:
        """Stop tracking all blocks, since their events were folded or are no longer sent."""
        if engine.blocks is not None:
            _increase(engine, self.abandoned, engine.blocks.tracked)
            engine.blocks = None

    def update_states(self, engine: Engine, running: int, waiting: int, deferred: int) -> None:
        """Update requests by state; the scheduler's own counts include preempted ones in waiting."""
        if engine.requests is None:
            return
        # The scheduler counts a preempted request as waiting or as deferred.
        preempted = min(len(engine.requests.requests.preempted), waiting + deferred)
        among_deferred = max(preempted - waiting, 0)
        waits = waiting - (preempted - among_deferred)
        numbers = (waits, deferred - among_deferred, preempted, running, 0)
        for slot, number in zip(self.states, numbers, strict=False):
            engine.values[slot] = number
        engine.values[self.longest] = engine.requests.longest_preemption

    def blocks(self, engine: Engine, lifetimes: Lives) -> None:
        """Observe lifetimes of blocks that ended."""
        for slot, observations in (
            (self.lifetimes, lifetimes.lifetimes),
            (self.idles, lifetimes.idles),
            (self.last_gaps, lifetimes.last_gaps),
            (self.gaps, lifetimes.gaps),
            (self.reuses, lifetimes.reuses),
            (self.reset_ages, lifetimes.reset_ages),
            (self.reset_idles, lifetimes.reset_idles),
        ):
            if observations:
                refused = engine.histogram(slot).observe_weighted(observations)
                if refused:
                    _increase(engine, self.omitted, refused)
        for slot, count in (
            (self.resets, lifetimes.resets),
            (self.halvings, lifetimes.halvings),
            (self.abandoned, lifetimes.abandoned),
            (self.unknown, lifetimes.unknown),
        ):
            _increase(engine, slot, count)


def _increase(engine: Engine, slot: int, amount: int) -> None:
    engine.values[slot] = (engine.values[slot] or 0) + amount
