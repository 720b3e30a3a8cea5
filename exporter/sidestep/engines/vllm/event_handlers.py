"""Hooks of request events and KV blocks: what they add to series beyond the plan's plain fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.tracking.kv_blocks.tracker import BlockObservations
from sidestep.tracking.requests.outcomes import Outcomes


class CoreHooks:
    """The functions behind the hooks of ``catalogue.engine_core``, for one layout."""

    FED: ClassVar = {
        "kv_abandoned_blocks", "kv_block_gaps", "kv_block_reset_ages", "kv_block_reset_idles",
        "kv_block_reuses", "kv_cache_resets", "kv_refused_blocks", "kv_unknown_events",
        "longest_preemption", "requests_by_state",
        "refused_requests", "untracked_requests",
    }  # fmt: skip

    def __init__(self, layout: Layout, registry: Registry) -> None:
        self.registry = registry
        hook = layout.hooks
        self.states = hook["requests_by_state"].slots
        self.longest = hook["longest_preemption"].slots[0]
        self.refused = hook["refused_requests"]
        self.untracked = hook["untracked_requests"]
        self.omitted = hook["refused_observations"].slots[0]
        self.iteration_tokens = hook["iteration_tokens"].slots[0]
        self.resets = hook["kv_cache_resets"].slots[0]
        self.refused_blocks = hook["kv_refused_blocks"].slots[0]
        self.abandoned = hook["kv_abandoned_blocks"].slots[0]
        self.unknown = hook["kv_unknown_events"].slots[0]
        self.lifetimes, self.idles, self.last_gaps = (
            layout.find(f"vllm:kv_block_{name}_seconds").slots[0]
            for name in ("lifetime", "idle_before_evict", "reuse_gap")
        )
        self.gaps, self.reuses, self.reset_ages, self.reset_idles = (
            hook[f"kv_block_{name}"].slots[0]
            for name in ("gaps", "reuses", "reset_ages", "reset_idles")
        )

    def requests(self, engine: Engine, outcomes: Outcomes) -> None:
        """What an item's request events came to, after its plain fields."""
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
        """Requests whose intervals cannot all be known, by reason."""
        for reason, count in found.items():
            self.registry.add(engine, self.untracked, reason, count)

    def abandon(self, engine: Engine) -> None:
        """Abandon the tracked blocks: events of them were folded, or nobody tells any more."""
        if engine.blocks is not None:
            _increase(engine, self.abandoned, engine.blocks.tracked)
            engine.blocks = None

    def states_of(self, engine: Engine, running: int, waiting: int, deferred: int) -> None:
        """The scheduler's requests by state; its own counts take preempted ones for waiting."""
        if engine.requests is None:
            return
        # It waits like any other, or is deferred, by the scheduler's own account.
        preempted = min(len(engine.requests.requests.preempted), waiting + deferred)
        among_deferred = max(preempted - waiting, 0)
        waits = waiting - (preempted - among_deferred)
        numbers = (waits, deferred - among_deferred, preempted, running, 0)
        for slot, number in zip(self.states, numbers, strict=False):
            engine.values[slot] = number
        engine.values[self.longest] = engine.requests.longest_preemption

    def observe_blocks(self, engine: Engine, found: BlockObservations) -> None:
        """Add what was observed of physical blocks."""
        for slot, observations in (
            (self.lifetimes, found.lifetimes),
            (self.idles, found.idles),
            (self.last_gaps, found.last_gaps),
            (self.gaps, found.gaps),
            (self.reuses, found.reuses),
            (self.reset_ages, found.reset_ages),
            (self.reset_idles, found.reset_idles),
        ):
            if observations:
                refused = engine.histogram(slot).observe_weighted(observations)
                if refused:
                    _increase(engine, self.omitted, refused)
        for slot, count in (
            (self.resets, found.resets),
            (self.refused_blocks, found.refused),
            (self.abandoned, found.abandoned),
            (self.unknown, found.unknown),
        ):
            _increase(engine, slot, count)
        if found.refused:
            self.registry.refused_blocks[engine.id] += found.refused


def _increase(engine: Engine, slot: int, amount: int) -> None:
    engine.values[slot] = (engine.values[slot] or 0) + amount
