"""The outcomes of a batch of request events: counts and observations, as a front end makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import msgspec

from sidestep.protocol.iteration_stats import IterationStats, PromptTokenStats
from sidestep.protocol.request_events import HANDED_OVER, WHOLE, Identity
from sidestep.tracking.requests.inflight import Request

UNTRACKED = ("capacity", "age", "restart", "unknown", "folded", "samples")
"""Reasons why not all intervals of a request are known, or how many parallel samples it had."""
FAILED = frozenset({"abort", "error", "refused", "engine_died", "expired"})
"""Reasons of requests that have not been served."""


class AbortedRequest(msgspec.Struct, gc=False):
    """A request when it was aborted: its tokens, and the seconds since it was queued."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    seconds: float | None = None


class EndedRequest(msgspec.Struct, gc=False):
    """A request that ended, with all that is known of it.

    Attributes:
        source: Identifies the process that numbered it.
        request: Its state before it ended; None if no earlier event is known.
        reason: One of vLLM's finish reasons, ``refused``, ``engine_died`` (its process sends no more)
            or ``expired``.
        stamp: Time of its end in the sender's monotonic clock.
        wall: Unix time of its end; None: unknown.
        refused: Reason why it was rejected.
        e2e: Seconds from its arrival to its end, as a front end has reported them.
        parts: Its e2e latency in parts by ``parts.KEYS``, which sum to it, without those of 0; None: unknown.
        transfer: What it was to its engine, as in ``Queued``; a hand-over that failed was all of it.
        remote: Seconds from its arrival at the engine that has computed its prompt to its arrival here.
    """

    number: int
    source: int
    request: Request | None
    reason: str
    stamp: float
    wall: float | None = None
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    max_tokens: int | None = None
    refused: str = ""
    e2e: float | None = None
    parts: dict[str, float] | None = None
    transfer: int = WHOLE
    remote: float = 0.0

    @property
    def is_service(self) -> bool:
        """False for a request that another engine continues, which counts it."""
        return self.transfer != HANDED_OVER

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to first token; None if a clock has stepped back, as in histograms."""
        ttft = None if self.request is None else self.request.ttft
        return ttft if ttft is not None and ttft >= 0.0 else None

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to end: the front end's where it reports such, else the core's."""
        found = self.core_e2e if self.e2e is None else self.e2e
        return found if found is not None and found >= 0.0 else None

    @property
    def core_e2e(self) -> float | None:
        """Seconds from its arrival to its end in the core; None: unknown."""
        arrival = None if self.request is None else self.request.arrival
        return None if arrival is None or self.wall is None else self.wall - arrival


class TenantCounts(msgspec.Struct, gc=False):
    """Counts of the requests of one tenant.

    Attributes:
        failed: Requests that ended by an abort or an error.
        computed: Prompt tokens whose KV was computed.
        cached: Prompt tokens whose KV came from a cache.
        transferred: Prompt tokens whose KV came from another engine.
        held_micros: KV blocks times microseconds in the batch, of requests that left the batch.
        queue_seconds: Time from the queue to the batch, of requests that ended.
        compute_seconds: Time from the batch to the last output, of requests that ended.
        cost: Cost of the tokens in ``prices.PARTS``; set where it is added up.
    """

    ended: int = 0
    failed: int = 0
    computed: int = 0
    cached: int = 0
    transferred: int = 0
    generated: int = 0
    held_micros: int = 0
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    cost: int = 0


class HandedOver(msgspec.Struct, gc=False):
    """A request that another engine continues; ``finish_reason`` is an index into ``FINISH_REASONS``."""

    finish_reason: int


class TracedLatency(NamedTuple):
    """An observation of a request whose client has sent a trace context.

    Attributes:
        latency: One of ``slo.LATENCIES``.
        wall: Unix time.
        trace: The W3C ``traceparent``.
    """

    latency: str
    seconds: float
    wall: float
    trace: str


class RequestSink(Protocol):
    """Receiver of the ended requests of one engine; it also names their tenants.

    Attributes:
        needs_gaps: Whether it needs the longest gap and the tenant's tokens of each request, which cost
            some time for each token.
    """

    needs_gaps: bool

    def tenant(self, identity: Identity | None, adapter: str) -> str:
        """Return the tenant of a request that begins; empty if tenants are not counted."""

    def end(self, ended: EndedRequest) -> None:
        """Receive a request that ended."""

    def lose(self, count: int) -> None:
        """Receive the number of requests that ended unseen."""


class IterationShape(msgspec.Struct, gc=False):
    """One engine step.

    A request is in prefill from its entry into the batch until its next output, also after a preemption.

    Attributes:
        duration: Seconds from the start of its scheduling to its output.
        interval: Seconds since the output of the previous step; None for the first step.
        kv_tokens: Tokens of the batch's requests whose KV was computed before.
        waiting_tokens: Tokens of all waiting requests, including generated ones of preempted requests.
        wall: Unix time of its output.
        limit: Index into ``LIMITS``; None: unknown.
    """

    duration: float | None
    interval: float | None
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_tokens: int
    kv_tokens: int
    waiting_tokens: int
    wall: float
    limit: int | None


class Outcomes(msgspec.Struct):
    """Counts and observations; the catalogue's rows name the fields.

    Attributes:
        iteration: Statistics in the form in which a front end has them.
        iteration_tokens: Tokens computed, one number per step that had output.
        slice_tokens: Tokens computed for parts of steps; another API server has the rest.
        preempted_seconds: Seconds from a preemption until the request was scheduled again.
        untracked: Requests whose intervals cannot all be known, by reason.
        omitted: Intervals omitted because they would be negative.
        limited: Requests whose adapter became ``__other__``.
        tenants: Counts by tenant, where tenants are counted.
        hops: Seconds from first outputs until a front end has reported them.
        traced: Observations among these that have a trace context; the longest inter-token latency of
            each request.
        held_micros: KV blocks times microseconds in the batch, of requests that left the batch.
        limit_micros: Microseconds by the limit that kept the next waiting request from the batch.
        limit_steps: Steps by the same.
        handed_over: Finish reasons of requests that another engine continues.
        handed_over_tokens: Tokens that these have generated, which the other engine generates again.
        received: Prompt tokens that another engine counts.
        local_prefills: Prompts that another engine has computed, of which nothing has arrived.
    """

    iteration: IterationStats
    aborted: list[AbortedRequest] = []
    steps: list[IterationShape] = []
    iteration_tokens: list[int] = []
    slice_tokens: int = 0
    preempted_seconds: list[float] = []
    refused: dict[str, int] = {}
    untracked: dict[str, int] = {}
    omitted: int = 0
    limited: int = 0
    hops: list[float] = []
    tenants: dict[str, TenantCounts] = {}
    traced: list[TracedLatency] = []
    held_micros: int = 0
    limit_micros: dict[str, int] = {}
    limit_steps: dict[str, int] = {}
    handed_over: list[HandedOver] = []
    handed_over_tokens: int = 0
    received: PromptTokenStats = msgspec.field(default_factory=PromptTokenStats)
    local_prefills: int = 0

    def of_tenant(self, tenant: str) -> TenantCounts:
        """Return the counts of a tenant."""
        found = self.tenants.get(tenant)
        if found is None:
            found = self.tenants[tenant] = TenantCounts()
        return found

    def trace(self, request: Request, wall: float, latencies: Mapping[str, float | None]) -> None:
        """Note observations of ``request`` if its client has sent a trace context."""
        if request.identity is not None and (trace := request.identity.trace):
            self.traced += [
                TracedLatency(name, seconds, wall, trace)
                for name, seconds in latencies.items()
                if seconds is not None
            ]

    def between(self, start: float | None, end: float | None) -> float | None:
        """Return the interval if both ends are known; count a negative one as omitted and return None."""
        if start is None or end is None:
            return None
        if end < start:
            self.omitted += 1
            return None
        return end - start
