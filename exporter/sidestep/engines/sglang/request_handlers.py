"""The handlers of requests that ended in a tokenizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import ClassVar

from sidestep.catalog.layout import Layout
from sidestep.engines.handlers import Handlers
from sidestep.engines.sglang import request_rows
from sidestep.engines.sglang.readers import own_total
from sidestep.engines.sglang.wire import SglangRequest, SglangRequests
from sidestep.engines.tenant_counters import TenantCounters, Total
from sidestep.metrics.engine import Engine, Number
from sidestep.metrics.registry import Registry
from sidestep.metrics.self_described import add_samples
from sidestep.protocol.limits import OTHER
from sidestep.protocol.self_described import Samples
from sidestep.tracking.requests.inflight import Request
from sidestep.tracking.requests.outcomes import EndedRequest, TenantCounts

PROMPT, CACHED = "sglang:prompt_tokens_total", "sglang:cached_tokens_total"


def _computed(engine: Engine) -> Number | None:
    prompt = own_total(engine, PROMPT)
    return None if prompt is None else prompt - (own_total(engine, CACHED) or 0)


def _own(family: str) -> Total:
    return lambda engine: own_total(engine, family)


_TOTALS: Mapping[str, Total] = {
    "ended": _own("sglang:num_requests_total"),
    "failed": _own("sglang:num_aborted_requests_total"),
    "computed": _computed,
    "cached": _own(CACHED),
    "generated": _own("sglang:generation_tokens_total"),
}
"""The tokenizer's own counters, to which the counters by tenant add up."""


class RequestHandlers(Handlers):
    """Applies ended requests to the engines of one registry."""

    HANDLED: ClassVar[Collection[str]] = request_rows.HANDLED

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        self._ended = layout.handled[request_rows.ENDED]
        self.tenants = TenantCounters(layout, registry, _TOTALS)
        self.appliers = {SglangRequests: self._requests}

    def _requests(self, engine: Engine, item: SglangRequests) -> None:
        # Raises if it refuses a family, before anything has changed.
        add_samples(self.registry, engine, Samples(item.engine, item.stamp, item.counters))
        sink = self.registry.sink_of(engine)
        tenants: defaultdict[str, TenantCounts] = defaultdict(TenantCounts)
        for each in item.ended:
            tenant = "" if sink is None else sink.tenant(each.identity, each.adapter)
            request = _request(each, tenant)
            if tenant:
                _count(tenants[tenant], each, request)
            if each.recorded:
                self.registry.add(engine, self._ended, each.reason, 1)
                if sink is not None:
                    sink.end(_ended(each, item.source, request))
        if sink is not None:
            for abort in item.aborted:
                tenants[sink.tenant(abort.identity, abort.adapter)].failed += 1
        if self.registry.accounting.is_on and self.tenants is not None:
            self.tenants.settle(engine, tenants)
        if item.unseen:
            self.registry.add(engine, self._ended, OTHER, item.unseen)
            if sink is not None:
                sink.lose(item.unseen)

    def lose_requests(self, engine: Engine, ended: int) -> None:
        """Count requests that have ended in folded items, unseen."""
        sink = self.registry.sink_of(engine) if ended else None
        if sink is not None:
            sink.lose(ended)


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


def _ended(each: SglangRequest, source: int, request: Request) -> EndedRequest:
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
    )


def _count(counts: TenantCounts, each: SglangRequest, request: Request) -> None:
    """Count a request for its tenant; the engine's own counters have only some of them."""
    if each.counted:
        counts.ended += 1
        counts.computed += max(each.prompt_tokens - each.cached_tokens, 0)
        counts.cached += each.cached_tokens
        counts.generated += each.output_tokens
    if each.scheduled is not None:
        if each.queued is not None:
            counts.queue_seconds += max(each.scheduled - each.queued, 0.0)
        if request.last is not None:
            counts.compute_seconds += max(request.last - each.scheduled, 0.0)
