"""The handlers of SGLang's items: a generated reader for plain fields, then the handler rows."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import ClassVar

from sidestep.catalog.dialect import AvailabilityCounts
from sidestep.catalog.layout import Layout
from sidestep.engines import lookup_counters
from sidestep.engines.handlers import Handlers, is_fresh
from sidestep.engines.lookup_counters import LookupCounters
from sidestep.engines.sglang import request_rows
from sidestep.engines.sglang.rows import QUEUES, ROUTING_KEY_BOUNDS, ROUTING_KEYS
from sidestep.engines.sglang.wire import QueueCount, SglangRequest, SglangRequests, SglangStats
from sidestep.engines.shared_rows import SERVICE_HANDLERS
from sidestep.engines.tenant_counters import TenantCounters
from sidestep.metrics.ended_counter import ended_counter
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Number
from sidestep.metrics.field_readers import compile_reader
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.registry import Registry
from sidestep.metrics.self_described import add_samples
from sidestep.protocol.cache_lookups import CacheLookups
from sidestep.protocol.limits import OTHER
from sidestep.protocol.messages import DECODE, PREFILL
from sidestep.protocol.request_events import HANDED_OVER, RECEIVED, WHOLE
from sidestep.protocol.self_described import Samples
from sidestep.tracking.requests.inflight import Request
from sidestep.tracking.requests.outcomes import EndedRequest, RequestSink, TenantCounts
from sidestep.tracking.requests.parts import FRONT_END_IN, PREFILL_REMOTE, QUEUE_UNKNOWN

TOTAL = ("",)
"""The key for a queue's requests of all priorities."""
_BUCKETS = [
    (str(above), str(upto))
    for above, upto in zip((0, *ROUTING_KEY_BOUNDS), (*ROUTING_KEY_BOUNDS, "+Inf"), strict=True)
]
OWN_COUNTERS = tuple(
    f"sglang:{name}_total"
    for name in (
        "num_requests", "num_aborted_requests", "prompt_tokens", "cached_tokens", "generation_tokens"
    )
)  # fmt: skip
OF_OTHERS = {PREFILL: ("ended", "failed", "generated"), DECODE: ("computed", "cached")}
"""Names that engines of a role leave to the others.

All requests of an engine for decode come with the KV of another engine, which has counted their prompts.
"""


def _totals(engine: Engine) -> dict[str, Number | None]:
    """Return the service's part of the tokenizer's own counters, to which those by tenant add up."""
    ended, failed, prompt, cached, generated = (_own_total(engine, name) for name in OWN_COUNTERS)
    totals = {
        "ended": ended,
        "failed": failed,
        # A counter is not negative, whatever a sender has counted.
        "computed": None if prompt is None else max(prompt - (cached or 0), 0),
        "cached": cached,
        "transferred": prompt if prompt is None or engine.role == DECODE else 0,
        "generated": generated,
    }
    of_others = OF_OTHERS.get(engine.role, ())
    return {name: 0 if name in of_others and n is not None else n for name, n in totals.items()}


class SglangHandlers(Handlers):
    """Applies SGLang's items to the engines of one registry."""

    HANDLED: ClassVar[Collection[str]] = {
        *request_rows.HANDLED,
        *(f"queue:{name}" for name in QUEUES),
        *(f"routing_keys:{name}" for name in ROUTING_KEYS),
        *lookup_counters.HANDLERS,
    }

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        self._read = compile_reader(layout, registry, SglangStats)
        self._queues = [(name, layout.handler_slot(f"queue:{name}")) for name in QUEUES]
        self._keys = [(name, layout.handler_slot(f"routing_keys:{name}")) for name in ROUTING_KEYS]
        self._ended = layout.handled[request_rows.ENDED]
        self._service = layout.handled[SERVICE_HANDLERS[0]]
        self.tenants = TenantCounters(layout, registry, _totals)
        self.appliers = {
            SglangStats: self._stats,
            SglangRequests: self._requests,
            CacheLookups: LookupCounters(layout, registry).apply,
        }

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

    def _requests(self, engine: Engine, item: SglangRequests) -> None:
        # Raises if it refuses a family, before anything has changed.
        add_samples(self.registry, engine, Samples(item.engine, item.stamp, item.counters))
        sink = self.registry.sink_of(engine)
        tenants: defaultdict[str, TenantCounts] = defaultdict(TenantCounts)
        for each in item.ended:
            tenant = "" if sink is None else sink.tenant(each.identity, each.adapter)
            request = _request(each, tenant)
            if tenant:
                _count(tenants[tenant], each, request, engine.role)
            if each.recorded:
                self._end(engine, sink, _ended(each, item.source, request, engine.role))
        if sink is not None and engine.role != PREFILL:
            for abort in item.aborted:
                tenants[sink.tenant(abort.identity, abort.adapter)].failed += 1
        if self.registry.accounting.is_on and self.tenants is not None:
            self.tenants.settle(engine, tenants)
        if item.unseen:
            self.registry.add(engine, self._ended, OTHER, item.unseen)
            if engine.role != PREFILL:
                self.registry.add(engine, self._service, OTHER, item.unseen)
            if sink is not None:
                sink.lose(item.unseen)

    def _end(self, engine: Engine, sink: RequestSink | None, ended: EndedRequest) -> None:
        self.registry.add(engine, self._ended, ended.reason, 1)
        if ended.is_service:
            self.registry.add(engine, self._service, ended.reason, 1)
        count = ended_counter(engine, self.registry.hand_overs)
        if count is not None:
            count(ended)
        if sink is not None:
            sink.end(ended)

    def lose_requests(self, engine: Engine, ended: int) -> None:
        """Count requests that ended while their events were folded."""
        sink = self.registry.sink_of(engine) if ended else None
        if sink is not None:
            sink.lose(ended)


def update_service(engine: Engine) -> None:
    """Compute the service's tokens from those that a tokenizer has counted."""
    totals = _totals(engine)
    for field, slot in _service_slots(engine.layout).items():
        if (total := totals[field]) is not None:
            engine.values[slot] = total


@functools.cache
def _service_slots(layout: Layout) -> Mapping[str, int]:
    _, prompt, generated = (layout.handled[name] for name in SERVICE_HANDLERS)
    slots = (*prompt.slots[:2], generated.slots[0])
    return dict(zip(("computed", "cached", "generated"), slots, strict=True))


def availability_counts(engine: Engine) -> AvailabilityCounts | None:
    """Return how many requests of a tokenizer were served, and how many were not.

    SGLang counts aborted requests among those that finished.
    """
    totals = _totals(engine)
    finished, aborted = totals["ended"], totals["failed"]
    if finished is None and aborted is None:
        return None
    return max((finished or 0) - (aborted or 0), 0), aborted or 0


def _own_total(engine: Engine, name: str) -> Number | None:
    """Return the sum of a counter of SGLang's over all of its labels; None if it has none."""
    family = engine.open_families.get(name)
    if family is None:
        return None
    return sum(n for n in family.children.values() if not isinstance(n, Histogram))


def _request(each: SglangRequest, tenant: str) -> Request:
    """Return the state of a request before it ended, as records read it."""
    has_tokens = each.first is not None
    return Request(
        each.created,
        adapter=each.adapter,
        arrival=each.arrival,
        cached=each.cached_tokens,
        prompt_tokens=each.prompt_tokens,
        tokens=each.output_tokens,
        queued=each.queued,
        scheduled=each.scheduled,
        first=each.first,
        last=each.ended if has_tokens else None,
        identity=each.identity,
        tenant=tenant,
        sample=each.sample,
        ttft=each.first - each.created if each.first is not None else None,
        external=each.external_tokens,
        preemptions=each.retractions,
        preempted_seconds=each.preempted_seconds,
        extra_tokens=each.draft_tokens,
    )


def _ended(each: SglangRequest, source: int, request: Request, role: str) -> EndedRequest:
    return EndedRequest(
        each.number,
        source,
        request,
        each.reason,
        each.ended,
        each.arrival + max(each.ended - each.created, 0.0),
        each.prompt_tokens,
        each.output_tokens,
        each.retractions,
        each.max_tokens,
        each.refused,
        parts=_parts(each, role),
        transfer={PREFILL: HANDED_OVER, DECODE: RECEIVED}.get(role, WHOLE),
    )


def _parts(each: SglangRequest, role: str) -> dict[str, float] | None:
    """Return the parts of a request's latency that a tokenizer knows; None if they are out of order.

    A request that never got as far as a stage was in the one before until its end. The queue's limit,
    other requests' prefill and the recomputation after a retraction are unknown. An engine for decode
    has a request in its queue once another engine has computed and sent its prompt.
    """
    reached = [each.created, each.queued, each.scheduled, each.first]
    stages = [stage for stage in reached if stage is not None]
    if None in reached[: len(stages)]:
        return None
    times = [*stages, each.ended]
    if times != sorted(times):
        return None
    before_queue = PREFILL_REMOTE if role == DECODE else FRONT_END_IN
    names = (before_queue, QUEUE_UNKNOWN, "prefill", "decode")
    found = {n: after - before for n, (before, after) in zip(names, pairwise(times), strict=False)}
    # The scheduler retracts requests that decode.
    preempted = min(each.preempted_seconds, found.get("decode", 0.0))
    if preempted:
        found["decode"] -= preempted
        found["preempted"] = preempted
    return {name: seconds for name, seconds in found.items() if seconds > 0.0}


def _count(counts: TenantCounts, each: SglangRequest, request: Request, role: str) -> None:
    """Count a request for its tenant as ``_totals`` does: its tokens only if the engine has counted them."""
    if each.counted and role == DECODE:
        counts.transferred += each.prompt_tokens
    elif each.counted:
        counts.computed += max(each.prompt_tokens - each.cached_tokens, 0)
        counts.cached += each.cached_tokens
    if each.counted and role != PREFILL:
        counts.ended += 1
        counts.generated += each.output_tokens
    if each.scheduled is not None:
        if each.queued is not None:
            counts.queue_seconds += max(each.scheduled - each.queued, 0.0)
        if request.last is not None:
            counts.compute_seconds += max(request.last - each.scheduled, 0.0)


def _spread(counts: list[int]) -> dict[tuple[str, ...], int]:
    """Return the number of routing keys by how many requests have them, not cumulative."""
    found: dict[tuple[str, ...], int] = dict.fromkeys(_BUCKETS, 0)
    for count in counts:
        found[_BUCKETS[bisect_left(ROUTING_KEY_BOUNDS, count)]] += 1
    return found
