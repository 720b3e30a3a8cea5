"""The answer of ``/api/v1/live``, which the live page and ``sidestep top`` show.

None means that a number is not known; 0 is a measured zero. Times and durations are in seconds,
shares are from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from sidestep.protocol.messages import BOTH
from sidestep.tracking.health.states import Level

WINDOW = 60.0
"""Seconds that rates, percentiles and counts of events cover."""

Attention = Literal["stalled", "unreachable", "slow", "full", "saturated", "outlier", "contested"]
"""Kinds of problems for which an engine needs attention."""


class Percentiles(msgspec.Struct, frozen=True, gc=False):
    """Percentiles of the observations within the window, as PromQL computes them."""

    p50: float
    p95: float
    p99: float
    count: float


class EngineRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One engine at one moment; the numbers of several may be merged into one row.

    Attributes:
        id: The engine's identity.
        engine: What people call it: the label ``engine``, or the identity.
        model: The model's name; empty if it has none.
        dialect: The kind of engine: ``vllm``, ``sglang``, ``triton`` and others.
        up: Whether a process or a server feeds it.
        level: How alarming it is; None: it serves no requests, and is not expected to.
        attention: Kind of its problem; None: it needs no attention.
        problem: Its problem in words, as the verdict names it after the engine's name.
        state: A state of docs/health.md; None where no process reports progress.
        reason: Why it is slow or stalled.
        stalled_seconds: Seconds without progress, while it is slow or stalled.
        running: Requests in the batch.
        waiting: Requests that wait to be scheduled.
        prompt_tokens_per_second: Prompt tokens computed.
        generation_tokens_per_second: Tokens generated.
        ttft: Time to first token.
        inter_token: Time between two outputs of a request.
        e2e: Time from arrival to the end of a request.
        kv_cache_usage: Share of the KV cache in use.
        prefix_hit_rate: Share of the looked-up tokens that the prefix cache had.
        finished: Requests that ended, for whatever reason.
        aborted: Those of them that were aborted.
        preemptions: Times that a request lost its place in the batch.
        saturation: Offered load divided by the load that the engine can serve.
        step_age: Seconds since the open step began; None without one.
        last_seen: Seconds since the engine's last item.
        contested: Whether another living server has its ids.
        role: ``prefill``, ``decode`` or ``both``.
        limit: What kept requests waiting for longest within the window; ``none``: they hardly waited;
            None: its limits are not known.
        limit_share: Share of its busy time in which that limit held; None without one.
        cause: What makes its requests slow, a name in ``catalog/tuning.py``; None: not known.
        parts: Seconds of the requests that ended within the window by part, which sum to their latency.
        stack: Frames of the thread that makes no progress, the innermost last.
        own: Numbers that only engines of its kind have, by name.
        summed: Whether sums over all engines include it; not where another one has the same requests.
    """

    id: str
    engine: str
    model: str
    dialect: str
    up: bool = True
    level: Level | None = None
    attention: Attention | None = None
    problem: str | None = None
    state: str | None = None
    reason: str | None = None
    stalled_seconds: float | None = None
    running: float | None = None
    waiting: float | None = None
    prompt_tokens_per_second: float | None = None
    generation_tokens_per_second: float | None = None
    ttft: Percentiles | None = None
    inter_token: Percentiles | None = None
    e2e: Percentiles | None = None
    kv_cache_usage: float | None = None
    prefix_hit_rate: float | None = None
    finished: float | None = None
    aborted: float | None = None
    preemptions: float | None = None
    saturation: float | None = None
    step_age: float | None = None
    last_seen: float | None = None
    contested: bool = False
    role: str = BOTH
    limit: str | None = None
    limit_share: float | None = None
    cause: str | None = None
    parts: dict[str, float] | None = None
    stack: list[str] | None = None
    own: dict[str, float | None] | None = None
    summed: bool = True


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """One line on all engines: how they are, and which is the worst and why.

    Attributes:
        level: None: no engine serves requests.
        engine: Identity of the engine that the text names; None where it names none.
    """

    level: Level | None
    text: str
    engine: str | None = None


class Warned(msgspec.Struct, frozen=True, gc=False):
    """A warning that the exporter has logged, such as a refused connection."""

    time: float
    text: str


class ExporterHealth(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The exporter's own health.

    Attributes:
        lost: Items that are missing from the counters: dropped by senders, or no longer had by them.
        loop_lag: Seconds by which the event loop was late.
        resident_bytes: Memory in use.
        last_scrape: Seconds since Prometheus last scraped it; None: never.
        dashboards: Address of dashboards of its metrics; empty: none is configured.
    """

    endpoints: list[str]
    streams: int
    series: int
    items_per_second: float | None
    lost: int
    loop_lag: float
    resident_bytes: int
    uptime: float
    last_scrape: float | None
    dashboards: str = ""


class Live(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answer of ``/api/v1/live``.

    Attributes:
        time: Unix time of the answer.
        total: All engines as one row; None without engines.
        warnings: The latest, the newest first.
    """

    version: str
    time: float
    verdict: Verdict
    total: EngineRow | None
    engines: list[EngineRow]
    exporter: ExporterHealth
    warnings: list[Warned]


class StreamRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One stream of an engine and its delivery.

    Attributes:
        state: ``open``, ``silent`` or ``closed``.
        applied: Sequence number of the last item applied.
        lag: Items that the sender holds and that are not acknowledged.
        lost: Items dropped by the sender for lack of memory.
        retransmitted: Items received again.
        folded: Items that the sender folded into fewer.
        errors: Records that the sender could not translate.
        last_seen: Seconds since its last message.
    """

    id: str
    state: str
    applied: int
    lag: int
    lost: int
    retransmitted: int
    folded: int
    errors: int
    last_seen: float


class EngineDetail(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Details of one engine.

    Attributes:
        info: Info metrics by short name: configuration, cache, adapters.
        stack: Frames of the thread that makes no progress, the innermost last; empty: none.
    """

    id: str
    labels: dict[str, str]
    features: list[str]
    restarts: int
    info: dict[str, dict[str, str]]
    streams: list[StreamRow]
    stack: list[str]


class HeatMap(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Observations of a histogram over time.

    Attributes:
        name: ``ttft``, ``inter_token``, ``e2e``, ``kv_lifetime``, ``kv_idle`` or ``kv_reuse_gap``.
        bounds: Upper bounds of the buckets, without +Inf.
        counts: For each interval of ``HistoryAnswer.times``, the observations per bucket; the last is +Inf.
    """

    name: str
    bounds: list[float]
    counts: list[list[int]]


class LimitHistory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The limit that held longest in each interval of an engine.

    Attributes:
        limits: Indices into ``HistoryAnswer.limit_names``, -1 where no limit is known. The last one is of
            the last of ``HistoryAnswer.times``.
    """

    id: str
    limits: list[int]


class HistoryAnswer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answer of ``/api/v1/live/history``: the last ten minutes of one engine, or of all as one.

    Attributes:
        times: Unix times of the ends of the intervals, ascending.
        series: Numbers for each interval, by their name in ``EngineRow``; percentiles as
            ``ttft_p50`` and so on, of the minute before.
        limits: Of the engine that the request names, or of each engine whose limits are known.
        detail: Of the engine that the request names; None for all engines.
    """

    times: list[float]
    series: dict[str, list[float | None]]
    heatmaps: list[HeatMap]
    limit_names: Sequence[str]
    limits: list[LimitHistory]
    detail: EngineDetail | None = None
