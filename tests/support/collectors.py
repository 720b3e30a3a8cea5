"""SGLang's collectors in small, of prometheus_client's real objects, and the page that comes of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest

from pages import Family, Labels, parse
from sidestep.catalog.buckets import DEFAULTS
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import Item, decode_item, encode_item
from sidestep.exposition.text_page import render
from sidestep.metrics.registry import Registry
from sidestep_adapters.sglang.collectors import Process

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
"""Attributes of a scheduler's collector, and their families."""
TOKENIZERS = {
    "prompt_tokens_total": "sglang:prompt_tokens_total",
    "num_aborted_requests_total": "sglang:num_aborted_requests_total",
    "histogram_time_to_first_token": "sglang:time_to_first_token_seconds",
    "histogram_inter_token_latency": "sglang:inter_token_latency_seconds",
    "prompt_tokens_histogram": "sglang:prompt_tokens_histogram",
}
STATS = ("num_running_reqs", "gen_throughput", "token_usage", "utilization")
"""Some of what ``log_stats`` sets."""


def metric(
    registry: CollectorRegistry,
    name: str,
    labels: Iterable[str],
    bounds: Iterable[float] | None = None,
) -> Any:
    """The family ``name`` as SGLang makes it: labels of the collector, then its own."""
    row = ROWS[name]
    shared = list(labels)
    names = [*shared, *(label for label in row.own_labels if label not in shared)]
    if row.kind == "histogram":
        told = bounds or row.bounds or DEFAULTS[row.buckets]
        return Histogram(name, "Theirs.", names, buckets=tuple(told), registry=registry)
    made = {"counter": Counter, "gauge": Gauge, "summary": Summary}[row.kind]
    return made(name, "Theirs.", names, registry=registry)


@dataclasses.dataclass
class QueueCount:
    """SGLang's."""

    total: int = 0
    by_priority: dict[int, int] | None = None


@dataclasses.dataclass
class SchedulerStats:
    """Some fields of SGLang's, of each kind that there is."""

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
    """What the collectors have in common."""

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
        """What it counts by itself."""
        return seen(generate_latest(self.registry).decode())


class SchedulerMetricsCollector(Collector):
    """A scheduler's: some children are asked for when it is made."""

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
        # For type checkers: attributes are set from a table.
        raise AttributeError(name)

    def log_stats(self, stats: Any) -> None:
        """A report."""
        for name in STATS:
            value = getattr(stats, name)
            getattr(self, name).labels(**self.labels).set(getattr(value, "total", value))
        self.last_log_time = time.perf_counter()

    def increment_realtime_tokens(self, mode: str, tokens: int, ranks: int | None = None) -> None:
        """Tokens of an iteration."""
        self.realtime_tokens_total.labels(**self.labels, mode=mode).inc(tokens)
        if ranks is not None:
            self.dp_cooperation_realtime_tokens_total.labels(
                **self.labels, mode=mode, num_prefill_ranks=ranks
            ).inc(tokens)

    def observe_dp_balance(self, scheduled: int, waited: float) -> None:
        """Through children that it has."""
        self._tokens["scheduled"].inc(scheduled)
        self._sync_wait.observe(waited)

    def observe_queue_time(self, latency: float) -> None:
        """From a request's entry to its first forward pass."""
        self.queue_time.labels(**self.labels).observe(latency)


class TokenizerMetricsCollector(Collector):
    """A tokenizer's."""

    def __init__(
        self,
        labels: Mapping[str, Any] = TOKENIZER,
        bounds: Mapping[str, Iterable[float]] | None = None,
    ) -> None:
        super().__init__(TOKENIZERS, labels, bounds or {})

    def __getattr__(self, name: str) -> Any:
        # As above.
        raise AttributeError(name)

    def observe_time_to_first_token(
        self, labels: dict[str, Any], value: float, *, stream: bool
    ) -> None:
        """A request's."""
        self.histogram_time_to_first_token.labels(
            **labels, is_streaming="true" if stream else "false"
        ).observe(value)

    def observe_inter_token_latency(
        self, labels: dict[str, Any], internval: float, num_new_tokens: int
    ) -> None:
        """An output's, by SGLang's own way round ``observe``."""
        if num_new_tokens <= 0:
            return
        found = self.histogram_inter_token_latency.labels(**labels)
        found._sum.inc(internval)
        for index, bound in enumerate(found._upper_bounds):
            if internval / num_new_tokens <= bound:
                found._buckets[index].inc(num_new_tokens)
                break


def seen(text: str) -> dict[str, Family]:
    """SGLang's families of a page, without labels that are empty: to Prometheus they are none."""
    return {
        name: Family(
            family.kind,
            {(n, _shown(labels)): value for (n, labels), value in family.samples.items()},
        )
        for name, family in parse(text).items()
        if name.startswith("sglang:") and family.samples
    }


def _shown(labels: Labels) -> Labels:
    return tuple((name, value) for name, value in labels if value)


class Shown:
    """The exporter's page of what a process has noted."""

    def __init__(self, process: Process, *, legacy: bool = False) -> None:
        self.process = process
        self.registry = Registry({"sglang": compile_layout(DIALECTS["sglang"], legacy=legacy)}, {})
        self.applier = Applier(self.registry)

    def take(self) -> list[Item]:
        """Send all that waits; what the exporter has decoded."""
        taken: list[Item] = []
        while self.process.deferred:
            taken += [decode_item(encode_item(item)) for item in self.process.deferred.items()]
        self.apply(taken)
        return taken

    def apply(self, items: Iterable[Item]) -> None:
        """As if they had arrived."""
        engines = [self.registry.register(info) for info in self.process._infos]
        for item in items:
            self.applier.apply(engines[item.engine], item)

    @property
    def page(self) -> dict[str, Family]:
        """SGLang's families, of all that was noted."""
        self.take()
        return seen(render(self.registry).decode())
