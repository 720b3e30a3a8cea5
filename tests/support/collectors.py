"""Fakes of SGLang's collectors over real prometheus_client metrics, and the pages that compare with them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest

from pages import Family, Labels, parse
from rendered import render
from sidestep.catalog.buckets import DEFAULTS
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import Item, encode_item
from sidestep.metrics.registry import Registry
from sidestep_adapters.sglang.process import Process

ROWS = {row.name: row for row in DIALECTS["sglang"].rows_for()}
RANK = {"model_name": "m", "engine_type": "unified", "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}
TOKENIZER = {"model_name": "m", "engine_type": "unified"}
SCHEDULERS = {
    "num_retracted_reqs_total": "sglang:num_retracted_requests_total",
    "cuda_graph_passes_total": "sglang:cuda_graph_passes_total",
    "queue_time": "sglang:queue_time_seconds",
    "per_stage_req_latency_seconds": "sglang:per_stage_req_latency_seconds",
    "realtime_tokens_total": "sglang:realtime_tokens_total",
    "dp_cooperation_realtime_tokens_total": "sglang:dp_cooperation_realtime_tokens_total",
    "estimated_flops_per_gpu_total": "sglang:estimated_flops_per_gpu_total",
    "eplb_balancedness": "sglang:eplb_balancedness",
    "weight_load_duration_seconds": "sglang:weight_load_duration_seconds",
    "dp_attention_tokens_total": "sglang:dp_attention_tokens_total",
    "dp_attention_sync_wait_seconds": "sglang:dp_attention_sync_wait_seconds",
}
"""Families by attribute of a scheduler's collector."""
TOKENIZERS = {
    "prompt_tokens_total": "sglang:prompt_tokens_total",
    "generation_tokens_total": "sglang:generation_tokens_total",
    "cached_tokens_total": "sglang:cached_tokens_total",
    "num_requests_total": "sglang:num_requests_total",
    "num_aborted_requests_total": "sglang:num_aborted_requests_total",
    "histogram_time_to_first_token": "sglang:time_to_first_token_seconds",
    "histogram_inter_token_latency": "sglang:inter_token_latency_seconds",
    "prompt_tokens_histogram": "sglang:prompt_tokens_histogram",
}
STATS = ("num_running_reqs", "gen_throughput", "token_usage", "utilization")
"""Some of the gauges that ``log_stats`` sets."""


def metric(
    registry: CollectorRegistry,
    name: str,
    labels: Iterable[str],
    bounds: Iterable[float] | None = None,
) -> Any:
    """Make the family ``name`` as SGLang does: the collector's labels come before its own."""
    row = ROWS[name]
    shared = list(labels)
    names = [*shared, *(label for label in row.own_labels if label not in shared)]
    if row.kind == "histogram":
        edges = bounds or row.bounds or DEFAULTS[row.buckets]
        return Histogram(name, "Theirs.", names, buckets=tuple(edges), registry=registry)
    made = {"counter": Counter, "gauge": Gauge, "summary": Summary}[row.kind]
    return made(name, "Theirs.", names, registry=registry)


@dataclasses.dataclass
class QueueCount:
    """A fake of SGLang's ``QueueCount``."""

    total: int = 0
    by_priority: dict[int, int] | None = None


@dataclasses.dataclass
class SchedulerStats:
    """A fake of SGLang's ``SchedulerStats`` with some fields of each kind."""

    num_running_reqs: Any = dataclasses.field(default_factory=QueueCount)
    num_queue_reqs: Any = dataclasses.field(default_factory=QueueCount)
    gen_throughput: float = 0.0
    decode_sum_seq_lens: int = 0
    token_usage: float = 0.0
    num_retracted_reqs: int = 0
    num_paused_reqs: int = 0
    fwd_occupancy: float = float("nan")
    utilization: float = 0.0
    hicache_host_used_tokens: int = 0
    hicache_host_total_tokens: int = 0
    hicache_host_mamba_used_states: int = 0
    hicache_host_mamba_total_states: int = 0
    routing_key_running_req_counts: list[int] = dataclasses.field(default_factory=list)


class Collector:
    """The part that all fake collectors share."""

    def __init__(
        self,
        families: Mapping[str, str],
        labels: Mapping[str, Any],
        bounds: Mapping[str, Iterable[float]],
    ) -> None:
        self.labels = dict(labels)
        self.registry = CollectorRegistry()
        for attribute, name in families.items():
            made = metric(self.registry, name, self.labels, bounds.get(name))
            setattr(self, attribute, made)

    @property
    def page(self) -> dict[str, Family]:
        """Families that the collector has counted in its own registry."""
        return seen(generate_latest(self.registry).decode())


class SchedulerMetricsCollector(Collector):
    """A fake of a scheduler's collector, which holds some label children from the start."""

    enable_lora = False
    enable_hierarchical_cache = False

    def __init__(
        self,
        labels: Mapping[str, Any] = RANK,
        bounds: Mapping[str, Iterable[float]] | None = None,
        **features: bool,
    ) -> None:
        super().__init__(SCHEDULERS, labels, bounds or {})
        vars(self).update(features)
        self.last_log_time = time.perf_counter()
        for name in STATS:
            names = [*labels]
            setattr(self, name, Gauge(f"sglang:{name}", "Theirs.", names, registry=self.registry))
        self._tokens = {
            kind: self.dp_attention_tokens_total.labels(**labels, kind=kind)
            for kind in ("scheduled", "imbalance")
        }
        self._sync_wait = self.dp_attention_sync_wait_seconds.labels(**labels)

    def __getattr__(self, name: str) -> Any:
        # For type checkers: attributes are set from SCHEDULERS.
        raise AttributeError(name)

    def log_stats(self, stats: Any) -> None:
        """Set the gauges of a report."""
        for name in STATS:
            value = getattr(stats, name)
            getattr(self, name).labels(**self.labels).set(getattr(value, "total", value))
        self.last_log_time = time.perf_counter()

    def increment_realtime_tokens(self, mode: str, tokens: int, ranks: int | None = None) -> None:
        """Count the tokens of an iteration."""
        self.realtime_tokens_total.labels(**self.labels, mode=mode).inc(tokens)
        if ranks is not None:
            self.dp_cooperation_realtime_tokens_total.labels(
                **self.labels, mode=mode, num_prefill_ranks=ranks
            ).inc(tokens)

    def observe_dp_balance(self, scheduled: int, waited: float) -> None:
        """Count through label children that were resolved at the start."""
        self._tokens["scheduled"].inc(scheduled)
        self._sync_wait.observe(waited)

    def observe_queue_time(self, latency: float) -> None:
        """Observe the time from a request's arrival to its first forward pass."""
        self.queue_time.labels(**self.labels).observe(latency)


class TokenizerMetricsCollector(Collector):
    """A fake of a tokenizer's collector."""

    def __init__(
        self,
        labels: Mapping[str, Any] = TOKENIZER,
        bounds: Mapping[str, Iterable[float]] | None = None,
    ) -> None:
        super().__init__(TOKENIZERS, labels, bounds or {})

    def __getattr__(self, name: str) -> Any:
        # For type checkers: attributes are set from TOKENIZERS.
        raise AttributeError(name)

    def observe_time_to_first_token(
        self, labels: dict[str, Any], value: float, *, stream: bool
    ) -> None:
        """Observe the time to first token of a request."""
        self.histogram_time_to_first_token.labels(
            **labels, is_streaming="true" if stream else "false"
        ).observe(value)

    def observe_one_finished_request(
        self,
        labels: dict[str, Any],
        prompt: int,
        generated: int,
        cached: int,
        *,
        details: dict[str, int] | None = None,
        stream: bool = False,
    ) -> None:
        """Count a request that finished, as SGLang does."""
        labelled = {**labels, "is_streaming": "true" if stream else "false"}
        self.prompt_tokens_total.labels(**labelled).inc(prompt)
        self.generation_tokens_total.labels(**labelled).inc(generated)
        for source, tokens in (details or {"total": cached}).items():
            if cached > 0 and tokens > 0:
                self.cached_tokens_total.labels(**labels, cache_source=source).inc(tokens)
        self.num_requests_total.labels(**labelled).inc(1)
        self.prompt_tokens_histogram.labels(**labels).observe(float(prompt))

    def observe_one_aborted_request(self, labels: dict[str, Any]) -> None:
        """Count an abort."""
        self.num_aborted_requests_total.labels(**labels).inc(1)

    def observe_inter_token_latency(
        self, labels: dict[str, Any], internval: float, num_new_tokens: int
    ) -> None:
        """Add latencies to buckets and sum directly, without ``observe``, as SGLang does."""
        if num_new_tokens <= 0:
            return
        found = self.histogram_inter_token_latency.labels(**labels)
        found._sum.inc(internval)
        for index, bound in enumerate(found._upper_bounds):
            if internval / num_new_tokens <= bound:
                found._buckets[index].inc(num_new_tokens)
                break


def seen(text: str) -> dict[str, Family]:
    """Return SGLang's families of a page without empty labels, which Prometheus does not store."""
    return {
        name: Family(
            family.kind,
            {(n, _shown(labels)): value for (n, labels), value in family.samples.items()},
        )
        for name, family in parse(text).items()
        if name.startswith("sglang:") and family.samples
    }


def same(theirs: dict[str, Family], ours: dict[str, Family]) -> None:
    """Check that two pages agree, up to the order in which sums were added."""
    assert theirs.keys() == ours.keys()
    for name, family in theirs.items():
        mine = ours[name]
        assert (name, mine.kind, mine.samples.keys()) == (name, family.kind, family.samples.keys())
        for key, value in family.samples.items():
            assert math.isclose(mine.samples[key], value, rel_tol=1e-9, abs_tol=1e-9), key


def _shown(labels: Labels) -> Labels:
    return tuple((name, value) for name, value in labels if value)


class Unpublished(Process):
    """The records of a process whose calls a test takes itself."""

    def __init__(self, *, beside: bool = False) -> None:
        super().__init__("ipc://nowhere", "pod", beside=beside)
        self.failures: list[str] = []
        self.deferred.fail = self.failures.append

    def start(self, name: str, model: str = "") -> None:
        """Start no publisher."""

    def taken(self) -> list[Item]:
        """Return the items of all calls."""
        found: list[Item] = []
        while self.deferred:
            found += self.deferred.items()
        return found


class Shown:
    """The exporter's page of what a process has recorded."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.registry = Registry({"sglang": compile_layout(DIALECTS["sglang"])})
        self.applier = Applier(self.registry)

    def take(self) -> list[Item]:
        """Apply all deferred items, and return them as the exporter decodes them."""
        taken: list[Item] = []
        while self.process.deferred:
            taken += [DIALECTS.decode(encode_item(item)) for item in self.process.deferred.items()]
        self.apply(taken)
        return taken

    def apply(self, items: Iterable[Item]) -> None:
        """Apply items as if they had arrived."""
        engines = [self.registry.register(info) for info in self.process._infos]
        for item in items:
            self.applier.apply(engines[item.engine], item)

    @property
    def page(self) -> dict[str, Family]:
        """SGLang's families after all deferred items."""
        self.take()
        return seen(render(self.registry).decode())
