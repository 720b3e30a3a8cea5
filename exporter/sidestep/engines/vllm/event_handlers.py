"""What request events and block lives add to an engine's series beyond the plan's plain fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.tracking.kv_blocks.tracker import Lives
from sidestep.tracking.requests.outcomes import Outcomes


class CoreHooks:
    """The functions behind the hooks of ``catalogue.engine_core``, for one layout."""

    FED: ClassVar = {
        "kv_abandoned_blocks", "kv_block_gaps", "kv_block_reset_ages", "kv_block_reset_idles",
        "kv_block_reuses", "kv_cache_resets", "kv_sample_halvings", "kv_unknown_events",
        "longest_preemption", "requests_by_state",
        "refused_requests", "untracked_requests",
    }  # fmt: skip

    def __init__(self, layout: Layout, registry: Registry) -> None:
        self.registry = registry
        hook = layout.handled
        self.states = hook["requests_by_state"].slots
        self.longest = hook["longest_preemption"].slots[0]
        self.refused = hook["refused_requests"]
        self.untracked = hook["untracked_requests"]
        self.omitted = hook["refused_observations"].slots[0]
        self.iteration_tokens = hook["iteration_tokens"].slots[0]
        self.resets = hook["kv_cache_resets"].slots[0]
        self.halvings = hook["kv_sample_halvings"].slots[0]
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
        """Let go of all lives of blocks: events of them were folded, or nobody tells any more."""
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

    def blocks(self, engine: Engine, lives: Lives) -> None:
        """Lives of blocks that an item of block events ended."""
        for slot, observations in (
            (self.lifetimes, lives.lifetimes),
            (self.idles, lives.idles),
            (self.last_gaps, lives.last_gaps),
            (self.gaps, lives.gaps),
            (self.reuses, lives.reuses),
            (self.reset_ages, lives.reset_ages),
            (self.reset_idles, lives.reset_idles),
        ):
            if observations:
                refused = engine.histogram(slot).observe_weighted(observations)
                if refused:
                    _increase(engine, self.omitted, refused)
        for slot, count in (
            (self.resets, lives.resets),
            (self.halvings, lives.halvings),
            (self.abandoned, lives.abandoned),
            (self.unknown, lives.unknown),
        ):
            _increase(engine, slot, count)


def _increase(engine: Engine, slot: int, amount: int) -> None:
    engine.values[slot] = (engine.values[slot] or 0) + amount
