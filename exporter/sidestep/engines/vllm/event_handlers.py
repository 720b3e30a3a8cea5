"""The handlers of request and block events."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.catalog.slo import SLO_REQUESTS, SLO_UNDECIDED
from sidestep.engines import lookup_counters, shared_rows, tenant_counters
from sidestep.engines.handlers import Handlers, increase
from sidestep.engines.lookup_counters import LookupCounters
from sidestep.engines.tenant_counters import ReadTotals, TenantCounters
from sidestep.engines.vllm.rows import E2E, TTFT
from sidestep.engines.vllm.service_counters import service_counters
from sidestep.engines.vllm.wire import FrontEndLatencies
from sidestep.metrics.ended_counter import REQUEST_PARTS, SERVICE_E2E, SERVICE_TTFT, TENANT_PARTS
from sidestep.metrics.engine import Engine
from sidestep.metrics.exemplars import exemplar
from sidestep.metrics.field_readers import compile_reader
from sidestep.metrics.recent_steps import RecentSteps
from sidestep.metrics.registry import COST, Registry
from sidestep.metrics.timeline import Timeline
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.block_events import BlockEvents
from sidestep.protocol.cache_lookups import CacheLookups
from sidestep.protocol.engine_totals import TOTAL_LIMIT, EngineTotals
from sidestep.protocol.messages import ENGINE_CORE
from sidestep.protocol.request_events import RequestEvents
from sidestep.tracking.kv_blocks.physical import PhysicalBlocks
from sidestep.tracking.kv_blocks.physical import check as check_blocks
from sidestep.tracking.kv_blocks.tracker import BlockObservations
from sidestep.tracking.requests.machine import check as check_events
from sidestep.tracking.requests.outcomes import Outcomes, TracedLatency

FAILED = ("abort", "error")


def tenant_totals(layout: Layout) -> ReadTotals:
    """Return a reader of the service's counters."""
    ends, sources = (
        layout.find(shared_rows.SERVICE_REQUESTS),
        layout.find(shared_rows.SERVICE_PROMPT),
    )
    received = layout.find(shared_rows.RECEIVED_PROMPT)
    found: Mapping[str, Sequence[int]] = {
        "ended": ends.slots,
        "failed": [ends.slots[ends.row.closed.index(reason)] for reason in FAILED],
        "computed": sources.slots[:1],
        "cached": sources.slots[1:2],
        "transferred": [received.slots[received.row.closed.index("external_kv_transfer")]],
        "generated": layout.find(shared_rows.SERVICE_GENERATED).slots,
        "held_micros": layout.find("sidestep_kv_block_seconds_total").slots,
    }
    return lambda engine: {
        field: sum(engine.values[slot] or 0 for slot in slots) for field, slots in found.items()
    }


FRONT_END_LATENCIES = ("ttft", "e2e")
"""Latencies that front ends report where there are any."""
BLOCK_HANDLERS = ("gaps", "reuses", "reset_ages", "reset_idles")
BLOCK_COUNTERS = {
    "resets": "kv_cache_resets",
    "refused": "kv_refused_blocks",
    "abandoned": "kv_abandoned_blocks",
    "unknown": "kv_unknown_events",
}
"""Handlers of what is observed of physical blocks, by the name in ``BlockObservations``."""


class EventHandlers(Handlers):
    """Applies request and block events to the engines of one registry."""

    HANDLED: ClassVar[Collection[str]] = {
        *(f"kv_block_{name}" for name in BLOCK_HANDLERS), *BLOCK_COUNTERS.values(),
        "goodput_requests", "goodput_tokens", "tenant_goodput_requests", "tenant_goodput_tokens",
        "front_end_hop", "longest_preemption", "refused_requests", "requests_by_state",
        "step_limit_seconds", "steps_by_limit", "untracked_requests", REQUEST_PARTS, TENANT_PARTS, COST,
        SERVICE_TTFT, SERVICE_E2E, *shared_rows.SERVICE_HANDLERS,
        *tenant_counters.HANDLERS, *lookup_counters.HANDLERS,
    }  # fmt: skip

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        self.appliers = {
            RequestEvents: self._requests,
            BlockEvents: self._blocks,
            CacheLookups: LookupCounters(layout, registry).apply,
        }
        self._read_outcomes = compile_reader(layout, registry, Outcomes)
        handled = layout.handled
        self._states = handled["requests_by_state"].slots
        self._longest = layout.handler_slot("longest_preemption")
        self._refused = handled["refused_requests"]
        self._limit_seconds = handled["step_limit_seconds"]
        self._limit_steps = handled["steps_by_limit"]
        self.service = service_counters(layout)
        self.tenants = TenantCounters(layout, registry, tenant_totals(layout))
        self._untracked = handled["untracked_requests"]
        self._omitted = layout.handler_slot("refused_observations")
        self._iteration_tokens = layout.handler_slot("iteration_tokens")
        self._front_end_families = {
            assignment.row.name
            for assignment in layout.assignments
            if assignment.row.source in (TTFT, E2E)
        }
        self._latency_slots = {
            latency: _slots_of(layout, family)
            for latency, family in layout.tables.latencies.items()
        }
        self._hop = layout.handler_slot("front_end_hop")
        own = ("lifetimes", "lifetime"), ("idles", "idle_before_evict"), ("last_gaps", "reuse_gap")
        self._block_histograms = {
            name: layout.find(f"vllm:kv_block_{family}_seconds").slots[0] for name, family in own
        } | {name: layout.handler_slot(f"kv_block_{name}") for name in BLOCK_HANDLERS}
        self._block_counters = {
            name: layout.handler_slot(handler) for name, handler in BLOCK_COUNTERS.items()
        }

    def _requests(self, engine: Engine, item: RequestEvents) -> None:
        check_events(item)
        tracker = self.registry.requests_of(engine)
        tracker.block_size = engine.block_size
        tracker.outputs.role, tracker.outputs.block_size = engine.role, engine.block_size
        tracker.outputs.external_is_cached = engine.external_is_cached
        reports = tracker.reports
        reports.expected = bool(engine.feeds.front_ends)
        outcomes = tracker.apply(item)
        if reports.expected:
            self._skip_front_end_latencies(engine, outcomes)
        self._read_outcomes(engine, outcomes, False)
        if outcomes.steps and self.registry.tracking.keeps_timeline:
            engine.part(Timeline).add_steps(outcomes.steps, self.registry.clock())
        if outcomes.slice_tokens:
            self.count_step_tokens(engine, outcomes.slice_tokens, is_slice=True)
        for tokens in outcomes.iteration_tokens:
            self.count_step_tokens(engine, tokens)
        increase(engine, self._omitted, outcomes.omitted)
        for reason, count in outcomes.refused.items():
            self.registry.add(engine, self._refused, reason, count)
        for limit, micros in outcomes.limit_micros.items():
            self.registry.add(engine, self._limit_seconds, limit, micros)
        for limit, count in outcomes.limit_steps.items():
            self.registry.add(engine, self._limit_steps, limit, count)
        self.count_untracked(engine, outcomes.untracked)
        self.registry.limited["label_values"] += outcomes.limited
        if self.registry.accounting.is_on and self.tenants is not None:
            self.tenants.settle(engine, outcomes.tenants)
        self._exemplify(engine, outcomes.traced)

    def count_step_tokens(self, engine: Engine, tokens: int, *, is_slice: bool = False) -> None:
        """Observe ``iteration_tokens_total`` once per engine step that had output.

        With several API servers, each reports its slice of the step, and the one that has received the
        scheduler's stats completes the step. Sum and count are exact at any time; a slice that
        arrives after its step was completed counts in the bucket of the next step.
        """
        histogram = engine.histogram(self._iteration_tokens)
        steps = engine.part(RecentSteps)
        if is_slice:
            steps.held_tokens = min(steps.held_tokens + tokens, TOTAL_LIMIT)
            histogram.sum += tokens
            return
        before = histogram.sum
        if histogram.observe(tokens + steps.held_tokens):
            increase(engine, self._omitted, 1)
        else:
            # The sum contains the held tokens already. It is assigned, since subtracting floats
            # could decrease it.
            histogram.sum = before + tokens
        steps.held_tokens = 0

    def _exemplify(self, engine: Engine, traced: Iterable[TracedLatency]) -> None:
        for latency, seconds, wall, trace in traced:
            one = exemplar(seconds, wall, trace)
            if one is not None:
                self.registry.has_exemplars = True
                for slot in self._latency_slots[latency]:
                    engine.histogram(slot).exemplify(one)

    def lose_requests(self, engine: Engine, ended: int) -> None:
        """Count requests that ended while their events were folded."""
        sink = engine.part(Trackers).sink
        if sink is not None:
            sink.lose(ended)

    def leave_to_front_ends(self, engine: Engine, added: EngineTotals) -> None:
        """Remove from a core's totals the latencies that its front ends send."""
        head, totals = added.head, added.totals
        for index, name in enumerate(head.histograms):
            if name in self._front_end_families:
                totals.histograms[index] = None
        objectives = engine.settings.objectives
        limits = [n for name in self._front_end_families for n in objectives.limits(name)]
        counted = {limit.objective for limit in limits}
        for name, children in zip(head.keyed, totals.keyed, strict=True):
            if name in (SLO_REQUESTS, SLO_UNDECIDED):
                children[:] = [child for child in children if child.labels[-1] not in counted]

    def _skip_front_end_latencies(self, engine: Engine, outcomes: Outcomes) -> None:
        """Remove the latencies that front ends send, and observe the hops of first tokens to them."""
        outcomes.iteration.time_to_first_tokens_iter = []
        for request in outcomes.iteration.finished_requests:
            request.e2e_latency = None
        outcomes.traced = [one for one in outcomes.traced if one.latency not in FRONT_END_LATENCIES]
        self._observe_hops(engine, outcomes.hops)

    def observe_front_end(self, engine: Engine, latencies: FrontEndLatencies) -> None:
        """Give a front end's latencies to their requests; observe hops, keep exemplars."""
        # The core may report the same requests later.
        tracker, at = self.registry.requests_of(engine), latencies.iteration_timestamp
        waited, traces = latencies.time_to_first_tokens, tracker.traces
        if traces:
            observed = (("ttft", waited), ("e2e", latencies.e2e_latencies))
            self._exemplify(
                engine,
                [
                    TracedLatency(latency, seconds, at, trace)
                    for latency, several in observed
                    for seconds in several
                    if (trace := traces.find(at - seconds))
                ],
            )
        live, reports = tracker.requests.live, tracker.reports
        self._observe_hops(engine, [reports.first_token(at - ttft, at, live) for ttft in waited])
        ended, queues = latencies.e2e_latencies, latencies.queue_times
        for e2e, queue in zip(
            ended, queues if len(queues) == len(ended) else repeat(None), strict=False
        ):
            reports.end_reported(at - e2e, at, queue)

    def _observe_hops(self, engine: Engine, hops: Iterable[float | None]) -> None:
        histogram = engine.histogram(self._hop)
        refused = sum(histogram.observe(hop) for hop in hops if hop is not None)
        increase(engine, self._omitted, refused)

    def _blocks(self, engine: Engine, item: BlockEvents) -> None:
        if engine.part(Trackers).blocks is None:
            check_blocks(item)
        blocks = self.registry.blocks_of(engine, PhysicalBlocks)
        self.observe_blocks(engine, blocks.apply(item))

    def count_untracked(self, engine: Engine, found: Mapping[str, int]) -> None:
        """Count requests whose intervals cannot all be known, by reason."""
        for reason, count in found.items():
            self.registry.add(engine, self._untracked, reason, count)
            if reason == "capacity":
                self.registry.refused_requests[engine.id] += count

    def abandon_blocks(self, engine: Engine) -> None:
        """Stop tracking all blocks, since their events were folded or are no longer sent."""
        trackers = engine.part(Trackers)
        if trackers.blocks is not None:
            increase(engine, self._block_counters["abandoned"], trackers.blocks.tracked)
            trackers.blocks = None
        super().abandon_blocks(engine)

    def update_states(self, engine: Engine, running: int, waiting: int, deferred: int) -> None:
        """Update requests by state; the scheduler's own counts include preempted ones in waiting."""
        tracker = engine.part(Trackers).requests
        # Front ends learn of a preemption when its request has its next output.
        if tracker is None or ENGINE_CORE not in engine.description.features:
            return
        # The scheduler counts a preempted request as waiting or as deferred.
        preempted = min(len(tracker.requests.preempted), waiting + deferred)
        among_deferred = max(preempted - waiting, 0)
        waits = waiting - (preempted - among_deferred)
        numbers = (waits, deferred - among_deferred, preempted, running, 0)
        for slot, number in zip(self._states, numbers, strict=False):
            engine.values[slot] = number
        engine.values[self._longest] = tracker.longest_preemption

    def observe_blocks(self, engine: Engine, found: BlockObservations) -> None:
        """Add what was observed of physical blocks."""
        for name, slot in self._block_histograms.items():
            if observations := getattr(found, name):
                refused = engine.histogram(slot).observe_weighted(observations)
                increase(engine, self._omitted, refused)
        for name, slot in self._block_counters.items():
            increase(engine, slot, getattr(found, name))
        if found.refused:
            self.registry.refused_blocks[engine.id] += found.refused


def _slots_of(layout: Layout, family: str) -> list[int]:
    source = layout.find(family).row.source
    return [
        assignment.slots[0]
        for assignment in layout.assignments
        if assignment.storage == "histogram" and assignment.row.source == source
    ]
