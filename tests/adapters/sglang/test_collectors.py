"""SGLang's collectors, tapped: the exporter's page equals the one they would have had."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from collectors import (
    RANK,
    ROWS,
    SCHEDULERS,
    TOKENIZER,
    QueueCount,
    SchedulerMetricsCollector,
    SchedulerStats,
    Shown,
    TokenizerMetricsCollector,
    seen,
)
from pages import Family
from sidestep.catalog.buckets import DEFAULTS
from sidestep.engines.items import SglangStats
from sidestep.engines.sglang.rows import QUEUES
from sidestep.engines.sglang.wire import QueueCount as Queued
from sidestep.engines.sglang.wire import SchedulerStats as Told
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Samples
from sidestep_adapters.sglang import deferred_metrics as deferred_module
from sidestep_adapters.sglang import plugin as sglang_plugin
from sidestep_adapters.sglang import taps as sglang_taps
from sidestep_adapters.sglang.collectors import Process, StatsRecorder, wrap
from sidestep_adapters.sglang.deferred_metrics import DeferredMetrics
from sidestep_adapters.sglang.metric_stubs import MetricStub
from sidestep_adapters.sglang.readers import ProcessFamilies, QueueLengths

Make = Callable[..., Process]
RANKED = {name: str(value) for name, value in RANK.items()}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make this process's taps as the plugin does, without an exporter."""
    found: list[Process] = []

    def make(*, beside: bool = False) -> Process:
        process = Process(f"ipc://{tmp_path}/nobody.ipc", "pod", beside=beside)
        # The notes are the tests' own to take.
        monkeypatch.setattr(process, "start", lambda *_: None)
        monkeypatch.setattr(sglang_taps, "_process", process)
        monkeypatch.setattr(sglang_taps, "usable_endpoint", lambda: True)
        found.append(process)
        return process

    yield make
    assert [process.publisher for process in found] == [None] * len(found)


def tapped(cls: type, role: str, *args: Any, **kwargs: Any) -> Any:
    """Return a collector as the plugin makes SGLang create it."""
    return sglang_taps.tapped(cls, role)(*args, **kwargs)


def same(theirs: dict[str, Family], ours: dict[str, Family]) -> None:
    """Return whether two pages agree, up to the order in which sums were added."""
    assert theirs.keys() == ours.keys()
    for name, family in theirs.items():
        mine = ours[name]
        assert (name, mine.kind, mine.samples.keys()) == (name, family.kind, family.samples.keys())
        for key, value in family.samples.items():
            assert math.isclose(mine.samples[key], value, rel_tol=1e-9, abs_tol=1e-9), key


# What SGLang calls, as (method, arguments), of a scheduler and of a tokenizer.
amounts = st.integers(0, 10**6) | st.floats(0, 1e9)
seconds = st.floats(0, 5000)
modes = st.sampled_from(["decode", "prefill_compute", "prefill_cache"])
labelled = st.sampled_from(["a", 'q"\\', "b c", "é"])
scheduler_calls = st.one_of(
    st.tuples(st.just("increment_realtime_tokens"), modes, st.integers(0, 10**6)),
    st.tuples(st.just("increment_realtime_tokens"), modes, st.integers(0, 99), st.integers(0, 3)),
    st.tuples(st.just("observe_dp_balance"), st.integers(0, 10**6), seconds),
    st.tuples(st.just("observe_queue_time"), seconds),
)
bare_calls = st.one_of(
    st.tuples(st.just("cuda_graph_passes_total"), st.just("inc"), labelled, amounts),
    st.tuples(st.just("num_retracted_reqs_total"), st.just("inc"), st.none(), amounts),
    st.tuples(
        st.just("estimated_flops_per_gpu_total"), st.just("inc"), st.none(), st.floats(0, 4e18)
    ),
    st.tuples(st.just("per_stage_req_latency_seconds"), st.just("observe"), labelled, seconds),
    st.tuples(st.just("eplb_balancedness"), st.just("observe"), labelled, st.floats(0, 1)),
    st.tuples(
        st.just("weight_load_duration_seconds"),
        st.sampled_from(["set", "inc", "dec"]),
        labelled,
        st.floats(-1e6, 1e6),
    ),
)
tokenizer_calls = st.one_of(
    st.tuples(st.just("first"), st.floats(0, 500), st.booleans()),
    st.tuples(st.just("later"), seconds, st.integers(-1, 5)),
    st.tuples(st.just("prompt"), st.integers(0, 2_000_000), st.booleans()),
)


def call(collector: Any, name: str, *args: Any) -> None:
    """Make one of ``scheduler_calls`` or ``bare_calls``."""
    if name not in SCHEDULERS:
        getattr(collector, name)(*args)
        return
    method, value, amount = args
    family = getattr(collector, name)
    (own,) = ROWS[SCHEDULERS[name]].own_labels or (None,)
    labels = collector.labels if own is None else {**collector.labels, own: value}
    # By position as often as by name.
    child = family.labels(*labels.values()) if len(str(amount)) % 2 else family.labels(**labels)
    getattr(child, method)(amount)


def send(collector: Any, name: str, value: Any, extra: Any) -> None:
    """Make one of ``tokenizer_calls``."""
    labels = dict(collector.labels)
    if name == "first":
        collector.observe_time_to_first_token(labels, value, stream=extra)
    elif name == "later":
        collector.observe_inter_token_latency(labels, value, extra)
    else:
        streaming = "true" if extra else "false"
        collector.prompt_tokens_total.labels(**labels, is_streaming=streaming).inc(value)
        collector.prompt_tokens_histogram.labels(**labels).observe(float(value))
        collector.num_aborted_requests_total.labels(**labels).inc()


@pytest.mark.parametrize("beside", [False, True])
@given(
    calls=st.lists(scheduler_calls | bare_calls | st.just(("flush",)), max_size=40),
    asked=st.lists(tokenizer_calls, max_size=20),
)
def test_pages_are_equal_for_any_calls(
    beside: bool, calls: list[tuple[Any, ...]], asked: list[tuple[Any, ...]]
) -> None:
    """SGLang's own collectors and the tapped ones, in both modes, get the same calls."""
    process = Process("ipc://nowhere", "pod", beside=beside)
    theirs = SchedulerMetricsCollector(), TokenizerMetricsCollector()
    ours = SchedulerMetricsCollector(), TokenizerMetricsCollector()
    untouched = [collector.page for collector in ours]
    for collector, role in zip(ours, ("scheduler", "tokenizer"), strict=True):
        made = wrap(process, collector, role)
        if role == "tokenizer":
            observe = sglang_taps.latency_recorder(
                made["histogram_inter_token_latency"], process.deferred
            )
            if not beside:
                vars(collector)["observe_inter_token_latency"] = observe
    shown = Shown(process)
    for name, *args in calls:
        if name == "flush":
            shown.take()
            continue
        for scheduler in (theirs[0], ours[0]):
            call(scheduler, name, *args)
    for name, value, extra in asked:
        for tokenizer in (theirs[1], ours[1]):
            send(tokenizer, name, value, extra)
        if beside and name == "later" and extra > 0:
            # As the plugin does: SGLang counts by its own way, past the meter.
            observe(ours[1].labels, value, extra)
    native = {**theirs[0].page, **theirs[1].page}
    kept = [collector.page for collector in ours]

    same(native, shown.page)
    assert kept == ([collector.page for collector in theirs] if beside else untouched)
    assert process.deferred.dropped == 0


def test_the_plugin_taps_in_place_of_the_collectors(made: Make) -> None:
    """With ``instead``, SGLang's own metrics stay as they were created."""
    process = made()
    scheduler = tapped(SchedulerMetricsCollector, "scheduler")
    tokenizer = tapped(TokenizerMetricsCollector, "tokenizer")
    before = scheduler.page, tokenizer.page
    scheduler.increment_realtime_tokens("decode", 7)
    scheduler.observe_dp_balance(5, 0.5)
    scheduler.log_stats(SchedulerStats(num_running_reqs=QueueCount(3)))
    tokenizer.observe_inter_token_latency(dict(TOKENIZER), 0.3, 3)
    tokenizer.observe_time_to_first_token(dict(TOKENIZER), 0.2, stream=True)
    page = Shown(process).page
    rank = tuple(sorted(RANKED.items()))

    assert (scheduler.page, tokenizer.page) == before
    assert page["sglang:num_running_reqs"].samples == {("sglang:num_running_reqs", rank): 3}
    tokens = page["sglang:realtime_tokens"].samples
    assert list(tokens.values()) == [7]
    latencies = page["sglang:inter_token_latency_seconds"].samples
    assert (
        latencies["sglang:inter_token_latency_seconds_count", tuple(sorted(TOKENIZER.items()))] == 3
    )
    assert sum(page["sglang:dp_attention_tokens"].samples.values()) == 5


def test_beside_both_pages_count(made: Make) -> None:
    """SGLang's page is the same as without the plugin."""
    process = made(beside=True)
    plain = SchedulerMetricsCollector(), TokenizerMetricsCollector()
    both = (
        tapped(SchedulerMetricsCollector, "scheduler"),
        tapped(TokenizerMetricsCollector, "tokenizer"),
    )
    for scheduler, tokenizer in (plain, both):
        scheduler.increment_realtime_tokens("decode", 7, 2)
        scheduler.observe_dp_balance(5, 0.5)
        scheduler.log_stats(SchedulerStats(num_running_reqs=QueueCount(3), gen_throughput=1.5))
        tokenizer.observe_inter_token_latency(dict(TOKENIZER), 0.3, 7)
        tokenizer.observe_inter_token_latency(dict(TOKENIZER), 0.3, 0)
        tokenizer.observe_time_to_first_token(dict(TOKENIZER), 0.2, stream=False)
    page = Shown(process).page
    silent = {"sglang:utilization"}
    theirs = {k: v for collector in plain for k, v in collector.page.items() if k not in silent}

    assert [collector.page for collector in both] == [collector.page for collector in plain]
    assert isinstance(vars(both[1])["histogram_inter_token_latency"], Histogram)
    same(theirs, {name: page[name] for name in theirs})


def test_a_report_sets_the_time_of_the_last_one(made: Make) -> None:
    """Otherwise an idle scheduler would report in every iteration of its loop."""
    made()
    scheduler = tapped(SchedulerMetricsCollector, "scheduler")
    scheduler.last_log_time = 0.0
    scheduler.log_stats(SchedulerStats())

    assert scheduler.last_log_time > 0


def test_weights_are_exact(made: Make) -> None:
    """A gap divided by its tokens counts once for each: sum and count equal SGLang's."""
    process = made()
    plain, tokenizer = TokenizerMetricsCollector(), tapped(TokenizerMetricsCollector, "tokenizer")
    for gap, tokens in ((0.3, 3), (1.0, 7), (0.004, 1), (9.0, 1), (2.0, 0), (2.0, -4)):
        for collector in (plain, tokenizer):
            collector.observe_inter_token_latency(dict(TOKENIZER), gap, tokens)
    name = "sglang:inter_token_latency_seconds"
    theirs, ours = plain.page[name].samples, Shown(process).page[name].samples

    assert ours == pytest.approx(theirs, rel=1e-12)
    assert sum(v for (sample, _), v in ours.items() if sample.endswith("_count")) == 12


def test_labels_by_request_are_the_childrens_own(made: Make) -> None:
    """Labels that a request fills in, such as a priority, are not the engine's."""
    process = made()
    labels = {**TOKENIZER, "priority": "", "tenant": ""}
    plain = TokenizerMetricsCollector(labels)
    tokenizer = tapped(TokenizerMetricsCollector, "tokenizer", labels)
    for collector in (plain, tokenizer):
        for priority, tenant in (("", ""), ("3", "a"), ("3", "b")):
            asked = {**labels, "priority": priority, "tenant": tenant}
            collector.observe_inter_token_latency(asked, 0.3, 3)
            collector.observe_time_to_first_token(asked, 0.2, stream=True)
    (info,) = process._infos

    assert info.labels == TOKENIZER
    name = "sglang:inter_token_latency_seconds"
    assert tokenizer.sidestep is not None
    same(
        {n: plain.page[n] for n in (name, "sglang:time_to_first_token_seconds")},
        {n: f for n, f in Shown(process).page.items() if "_seconds" in n},
    )


def test_configured_bounds_are_sent(made: Make) -> None:
    """Bounds of bucket families are sent; the buckets equal SGLang's."""
    process = made()
    bounds = {"sglang:inter_token_latency_seconds": [0.5, 1.0, 2.0]}
    tokenizer = tapped(TokenizerMetricsCollector, "tokenizer", TOKENIZER, bounds)
    tokenizer.observe_inter_token_latency(dict(TOKENIZER), 1.5, 2)
    (info,) = process._infos

    assert info.bounds == {"sglang_inter_token_latency": [0.5, 1.0, 2.0]}
    samples = Shown(process).page["sglang:inter_token_latency_seconds"].samples
    assert [v for (name, _), v in samples.items() if name.endswith("_bucket")] == [0, 2, 2, 2]


def test_default_bounds_are_not_sent(made: Make) -> None:
    """The exporter has them."""
    process = made()
    tapped(SchedulerMetricsCollector, "scheduler")
    tapped(TokenizerMetricsCollector, "tokenizer")

    assert [info.bounds for info in process._infos] == [{}, {}]


def test_unknown_families_describe_themselves(made: Make) -> None:
    """Families of another release are sent with help and bounds, for each kind."""
    process = made()
    scheduler = SchedulerMetricsCollector()
    registry = scheduler.registry
    names = [*RANK, "what"]
    vars(scheduler).update(
        next_total=Counter("sglang:next_total", "Next\nrelease's.", names, registry=registry),
        next_ratio=Gauge("sglang:next_ratio", "Next.", names, registry=registry),
        next_seconds=Histogram(
            "sglang:next_seconds", "Next.", names, buckets=(0.5, 2), registry=registry
        ),
    )
    wrap(process, scheduler, "scheduler")
    scheduler.next_total.labels(**RANK, what="a").inc(3)
    scheduler.next_ratio.labels(**RANK, what="a").set(0.5)
    scheduler.next_seconds.labels(**RANK, what="a").observe(1)
    shown = Shown(process)
    families = [f for item in shown.take() if isinstance(item, Samples) for f in item.families]
    sent = {family.name: family for family in families}

    assert sent["sglang:next_total"].help == "Next?release's."
    assert sent["sglang:next_seconds"].bounds == [0.5, 2.0]
    page = shown.page
    assert {name: page[name].kind for name in page if "next" in name} == {
        "sglang:next": "counter",
        "sglang:next_ratio": "gauge",
        "sglang:next_seconds": "histogram",
    }


def test_gauges_of_reports_are_not_replaced(made: Make) -> None:
    """The gauges of ``log_stats`` are sent with the report; dead ones are not sent."""
    made()
    scheduler = tapped(SchedulerMetricsCollector, "scheduler")

    assert {name for name, value in vars(scheduler).items() if isinstance(value, MetricStub)} == {
        *SCHEDULERS
    }
    for name in ("num_running_reqs", "gen_throughput", "utilization"):
        assert isinstance(vars(scheduler)[name], Gauge)


def test_existing_children_are_exposed_at_zero(made: Make) -> None:
    """These are counters and histograms without own labels, or looked up in the constructor."""
    process = made()
    plain = SchedulerMetricsCollector()
    tapped(SchedulerMetricsCollector, "scheduler")

    same(plain.page, Shown(process).page)


def test_children_looked_up_beforehand_are_replaced(made: Make) -> None:
    """Children in a dict, too; in mode beside both objects keep counting."""
    for beside in (False, True):
        process = made(beside=beside)
        scheduler = tapped(SchedulerMetricsCollector, "scheduler")
        scheduler.observe_dp_balance(4, 0.25)
        page = Shown(process).page
        assert sum(page["sglang:dp_attention_tokens"].samples.values()) == 4
        native = scheduler.page["sglang:dp_attention_tokens"].samples
        assert sum(native.values()) == (4 if beside else 0)


def test_collectors_of_equal_labels_are_one_engine(made: Make) -> None:
    """They are one series on SGLang's own page; other ranks are other engines."""
    process = made()
    for rank in (0, 1, 1):
        tapped(SchedulerMetricsCollector, "scheduler", {**RANK, "dp_rank": rank})
    tapped(SchedulerMetricsCollector, "storage", {**RANK, "dp_rank": 1})
    labels = "dp_rank={},engine_type=unified,moe_ep_rank=0,pp_rank=0,tp_rank=0"

    assert [info.id for info in process._infos] == [
        f"pod/m/sglang/scheduler/{labels.format(0)}",
        f"pod/m/sglang/scheduler/{labels.format(1)}",
        f"pod/m/sglang/storage/{labels.format(1)}",
    ]
    assert process._infos[0].labels == {**RANKED, "dp_rank": "0"}


def test_options_are_features(made: Make) -> None:
    """They are read from the collector's attributes."""
    process = made()
    tapped(SchedulerMetricsCollector, "scheduler", enable_lora=True, enable_hierarchical_cache=True)

    assert process._infos[0].features == ["hicache", "lora"]


def test_a_class_is_tapped_once() -> None:
    """SGLang may ask repeatedly, and finds the class by name in its processes."""
    once = sglang_taps.tapped(SchedulerMetricsCollector, "scheduler")

    assert sglang_taps.tapped(SchedulerMetricsCollector, "scheduler") is once
    assert sglang_taps.tapped(once, "scheduler") is once
    assert once.__name__ == "SidestepSchedulerMetricsCollector"
    assert issubclass(once, SchedulerMetricsCollector)


def test_the_resolved_class_is_tapped_for_any_arguments() -> None:
    """0.5.15 passes its arguments first; untapped roles keep the chosen class."""
    chosen = SchedulerMetricsCollector
    once = sglang_taps.tapped(chosen, "scheduler")

    assert sglang_plugin._after_resolve(chosen, "scheduler", object) is once
    assert sglang_plugin._after_resolve(chosen, SimpleNamespace(), "scheduler", object) is once
    assert sglang_plugin._after_resolve(chosen, role="scheduler", default_cls=object) is once
    assert sglang_plugin._after_resolve(dict, "expert_dispatch", dict) is None


def test_classes_are_replaced_by_hooks_in_older_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook registry of 0.5.11 is used; classes that a release lacks are skipped."""
    replaced: dict[str, type] = {}

    class HookRegistry:
        @staticmethod
        def register(path: str, hook: Any, kind: str = "after") -> None:
            if kind == "replace":
                replaced[path] = hook

    registry: Any = ModuleType("hook_registry")
    registry.HookRegistry = HookRegistry
    registry.HookType = SimpleNamespace(AFTER="after", REPLACE="replace")
    collectors: Any = ModuleType("metrics_collector")
    collectors.SchedulerMetricsCollector = SchedulerMetricsCollector
    collectors.TokenizerMetricsCollector = TokenizerMetricsCollector
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    monkeypatch.setitem(sys.modules, sglang_taps.COLLECTORS, collectors)
    monkeypatch.setattr(sglang_plugin, "usable_endpoint", lambda: True)
    sglang_plugin.plugin()

    module = sglang_taps.COLLECTORS
    assert replaced == {
        f"{module}.SchedulerMetricsCollector": sglang_taps.tapped(
            SchedulerMetricsCollector, "scheduler"
        ),
        f"{module}.TokenizerMetricsCollector": sglang_taps.tapped(
            TokenizerMetricsCollector, "tokenizer"
        ),
    }


class Older(SchedulerMetricsCollector):
    """A release that reports more fields, and has gauges instead of histograms."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        names = [*self.labels]
        for name in ("engine_startup_time", "kv_transfer_latency_ms", "num_next_reqs"):
            made = Gauge(f"sglang:{name}", "Theirs.", names, registry=self.registry)
            vars(self)[name] = made

    def log_stats(self, stats: Any) -> None:
        """Report more fields."""
        super().log_stats(stats)
        for name in ("engine_startup_time", "kv_transfer_latency_ms", "num_next_reqs"):
            value = getattr(stats, name)
            if value is not None:
                vars(self)[name].labels(**self.labels).set(getattr(value, "total", value))


@pytest.mark.parametrize("beside", [False, True])
def test_reports_of_other_releases_lose_nothing(made: Make, *, beside: bool) -> None:
    """A field without a catalogue entry has a gauge of its name; one of another kind is left out."""
    process = made(beside=beside)
    scheduler = tapped(Older, "scheduler")
    stats = SimpleNamespace(
        **vars(SchedulerStats(num_running_reqs=3)),
        engine_startup_time=12.5,
        kv_transfer_latency_ms=7.0,
        num_next_reqs=QueueCount(4),
        num_prefill_prealloc_queue_reqs=2,
    )
    scheduler.log_stats(stats)
    stats.engine_startup_time = None
    scheduler.log_stats(stats)
    page = Shown(process).page

    assert {n: [*f.samples.values()] for n, f in page.items() if f.kind == "gauge"} == {
        "sglang:decode_sum_seq_lens": [0],
        "sglang:engine_startup_time": [12.5],
        "sglang:gen_throughput": [0],
        "sglang:num_next_reqs": [4],
        "sglang:num_paused_reqs": [0],
        "sglang:num_prefill_bootstrap_queue_reqs": [2],
        "sglang:num_queue_reqs": [0],
        "sglang:num_retracted_reqs": [0],
        "sglang:num_running_reqs": [3],
        "sglang:token_usage": [0],
        "sglang:routing_key_running_req_count": [0] * 11,
    }
    assert "sglang:kv_transfer_latency_ms" not in page


@pytest.mark.parametrize("beside", [False, True])
def test_labels_that_an_older_release_lacks_are_absent(made: Make, *, beside: bool) -> None:
    """Up to 0.5.15 no label says whether a request streams."""
    process = made(beside=beside)
    labels = [*TOKENIZER]
    bounds = DEFAULTS["sglang_time_to_first_token"]

    def older(registry: CollectorRegistry) -> SimpleNamespace:
        name = "sglang:time_to_first_token_seconds"
        return SimpleNamespace(
            labels=TOKENIZER,
            first=Histogram(name, "Theirs.", labels, buckets=bounds, registry=registry),
            prompt=Counter("sglang:prompt_tokens_total", "Theirs.", labels, registry=registry),
            cached=Counter("sglang:cached_tokens_total", "Theirs.", labels, registry=registry),
        )

    registry = CollectorRegistry()
    plain, ours = older(registry), older(CollectorRegistry())
    wrap(process, ours, "tokenizer")
    for collector in (plain, ours):
        collector.first.labels(**TOKENIZER).observe(0.3)
        collector.prompt.labels(**TOKENIZER).inc(5)
        collector.cached.labels(**TOKENIZER).inc(2)

    same(seen(generate_latest(registry).decode()), Shown(process).page)


def test_other_attributes_of_a_child_come_from_sglang(made: Make) -> None:
    """Older releases read a histogram's buckets: they exist and are empty."""
    made()
    tokenizer = tapped(TokenizerMetricsCollector, "tokenizer")
    scheduler = tapped(SchedulerMetricsCollector, "scheduler")
    several = scheduler.dp_cooperation_realtime_tokens_total
    child = tokenizer.histogram_time_to_first_token.labels(**TOKENIZER, is_streaming="true")
    child.observe(0.3)

    assert [bucket.get() for bucket in child._buckets] == [0] * 19
    assert tokenizer.histogram_inter_token_latency.labels(**TOKENIZER)._sum.get() == 0
    assert several.labels(**RANK, mode="a", num_prefill_ranks=1)._value.get() == 0


def test_a_failed_tap_leaves_the_collector_unchanged(
    made: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang counts alone, and the error is logged."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("bug")

    made()
    monkeypatch.setattr(Process, "engine", broken)
    plain = SchedulerMetricsCollector(), TokenizerMetricsCollector()
    found = (
        tapped(SchedulerMetricsCollector, "scheduler"),
        tapped(TokenizerMetricsCollector, "tokenizer"),
    )
    for scheduler, tokenizer in (plain, found):
        scheduler.increment_realtime_tokens("decode", 7)
        scheduler.log_stats(SchedulerStats())
        tokenizer.observe_inter_token_latency(dict(TOKENIZER), 0.3, 3)

    assert [collector.page for collector in found] == [collector.page for collector in plain]
    assert [r.levelno for r in caplog.records] == [logging.ERROR] * 2


def test_without_an_endpoint_nothing_is_tapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A derived class behaves exactly as SGLang's own."""
    monkeypatch.setattr(sglang_taps, "_process", None)
    monkeypatch.setattr(sglang_taps, "usable_endpoint", lambda: False)
    plain, found = SchedulerMetricsCollector(), tapped(SchedulerMetricsCollector, "scheduler")
    for collector in (plain, found):
        collector.log_stats(SchedulerStats(gen_throughput=3.5))
        collector.increment_realtime_tokens("decode", 7)

    assert found.page == plain.page
    assert found.sidestep is None


def test_nothing_that_a_tap_raises_reaches_the_engine(made: Make) -> None:
    """Reports without fields, reporters without a scheduler and invalid amounts are counted."""
    process = made()
    failures: list[str] = []
    process.deferred.fail = failures.append
    scheduler = tapped(SchedulerMetricsCollector, "scheduler")
    tokenizer = tapped(TokenizerMetricsCollector, "tokenizer")
    scheduler.log_stats(object())
    sglang_plugin._after_iteration(None, SimpleNamespace(metrics_collector=scheduler))
    sglang_plugin._after_iteration(None, SimpleNamespace(metrics_collector=None))
    scheduler.increment_realtime_tokens("decode", "many")
    tokenizer.observe_inter_token_latency(object(), 0.3, 3)
    Shown(process).take()

    assert len(failures) == 3


def test_latencies_beyond_the_limit_are_counted_as_dropped(made: Make, monkeypatch: Any) -> None:
    """The most frequent call appends to the queue directly, with the same limit."""
    monkeypatch.setattr(deferred_module, "MAX_QUEUED", 5)
    process = made()
    tokenizer = tapped(TokenizerMetricsCollector, "tokenizer")
    process.deferred.clear()
    dropped = process.deferred.dropped
    for _ in range(9):
        tokenizer.observe_inter_token_latency(dict(TOKENIZER), 0.3, 1)
    tokenizer.observe_time_to_first_token(dict(TOKENIZER), 0.3, stream=True)

    assert process.deferred.dropped - dropped == 5
    assert len(process.deferred) == 5


# The scheduler's stats.


class Reports:
    """A recorder of stats, and its items."""

    def __init__(self) -> None:
        self.deferred = DeferredMetrics()
        self.failures: list[str] = []
        self.deferred.fail = self.failures.append
        self.source = StatsRecorder(self.deferred, 0)

    @property
    def sent(self) -> Told:
        """Return the stats of the only item."""
        (item,) = self.deferred.items()
        assert isinstance(item, SglangStats)
        return item.stats


@pytest.fixture
def reports() -> Reports:
    """Return a recorder without reports."""
    return Reports()


def test_a_report_is_copied(reports: Reports) -> None:
    """Each report keeps its values at that time; of two that wait the newer one counts."""
    stats = SchedulerStats(num_running_reqs=QueueCount(3), gen_throughput=10.0)
    reports.source.record_report(stats)
    stats.gen_throughput = 20.0
    first = reports.sent
    reports.source.record_report(stats)
    stats.num_running_reqs = QueueCount(4)
    reports.source.record_report(stats)

    assert first.gen_throughput == 10.0
    second = reports.sent
    assert (second.gen_throughput, second.num_running_reqs) == (20.0, Queued(4))


def test_nan_is_absent(reports: Reports) -> None:
    """SGLang uses NaN for values that were never measured; it is no failure."""
    reports.source.record_report(SchedulerStats(num_running_reqs=QueueCount(1)))
    sent = reports.sent

    assert sent.fwd_occupancy is None
    assert sent.lora_pool_slots_used is None
    assert reports.failures == []


def test_queues_by_priority(reports: Reports) -> None:
    """Priorities are numbers, or none where a request has none."""
    queue = QueueCount(6, {5: 1, -1: 2, None: 3})  # type: ignore[dict-item]
    reports.source.record_report(SchedulerStats(num_queue_reqs=queue))

    assert reports.sent.num_queue_reqs == Queued(6, {"5": 1, "-1": 2, "None": 3})
    assert reports.failures == []


def test_queues_of_older_releases_are_numbers(reports: Reports) -> None:
    """A queue is its total; with running requests the scheduler is not idle."""
    reports.source.record_report(
        SchedulerStats(num_running_reqs=2, num_queue_reqs=0, gen_throughput=7.0)
    )
    sent = reports.sent

    assert sent.num_running_reqs == Queued(2)
    assert sent.num_queue_reqs == Queued(0)
    assert sent.gen_throughput == 7.0
    assert reports.failures == []


@pytest.mark.parametrize("queue", ["num_running_reqs", "num_queue_reqs"])
def test_an_idle_scheduler_has_idle_values(reports: Reports, queue: str) -> None:
    """The last report's throughput is replaced once no request is left."""
    stats = SchedulerStats(
        gen_throughput=10.0, decode_sum_seq_lens=5, num_retracted_reqs=1, token_usage=0.5
    )
    busy_stats = dataclasses.replace(stats)
    setattr(busy_stats, queue, QueueCount(1))
    reports.source.record_report(busy_stats)
    busy = reports.sent
    reports.source.record_report(stats)
    idle = reports.sent

    assert (busy.gen_throughput, busy.decode_sum_seq_lens, busy.num_retracted_reqs) == (10, 5, 1)
    assert (idle.gen_throughput, idle.decode_sum_seq_lens, idle.num_retracted_reqs) == (0, 0, 0)
    assert idle.token_usage == 0.5


def test_queue_lengths_between_reports(reports: Reports) -> None:
    """They replace the report's lengths only; before the first report nothing is sent."""
    reports.source.record((), (9, 9), 1)
    assert reports.deferred.items() == []
    reports.source.record_report(SchedulerStats(num_running_reqs=QueueCount(1), token_usage=0.5))
    reports.source.record((), (7, 2), 1)
    sent = reports.sent
    reports.source.record((), (0, 0), 1)
    idle = reports.sent

    assert (sent.num_running_reqs, sent.num_queue_reqs) == (Queued(7), Queued(2))
    assert sent.token_usage == 0.5
    assert (idle.num_running_reqs, idle.gen_throughput) == (Queued(0), 0)


def test_stats_are_part_of_the_current_state(reports: Reports) -> None:
    """A restarted exporter gets them from an idle engine, too."""
    assert reports.source.current_state(1.0) == []
    reports.source.record_report(SchedulerStats(token_usage=0.5))
    first = reports.sent
    (again,) = reports.source.current_state(1.0)

    assert isinstance(again, SglangStats)
    assert again.stats == first


def test_a_missing_mamba_pool_has_no_series(reports: Reports) -> None:
    """SGLang exposes these two if the total is above 0."""
    stats = SchedulerStats(hicache_host_total_tokens=100)
    reports.source.record_report(stats)
    without = reports.sent
    reports.source.record_report(
        dataclasses.replace(
            stats, hicache_host_mamba_total_states=8, hicache_host_mamba_used_states=3
        )
    )
    there = reports.sent

    assert without.hicache_host_total_tokens == 100
    assert without.hicache_host_mamba_total_states is None
    assert without.hicache_host_mamba_used_states is None
    assert (there.hicache_host_mamba_total_states, there.hicache_host_mamba_used_states) == (8, 3)


def test_an_invalid_field_drops_only_itself(reports: Reports) -> None:
    """It is counted each time."""
    reports.source.record_report(
        SchedulerStats(gen_throughput=object(), token_usage=0.5, num_running_reqs=QueueCount(1))  # type: ignore[arg-type]
    )
    sent = reports.sent

    assert (sent.gen_throughput, sent.token_usage) == (None, 0.5)
    assert len(reports.failures) == 1


# What is read.


class Scheduler:
    """The attributes of SGLang's scheduler that are read."""

    def __init__(self, **more: Any) -> None:
        self.running_batch = SimpleNamespace(reqs=[1, 2, 3])
        self.waiting_queue = [4]
        vars(self).update(more)


def test_queue_lengths_are_read_from_the_schedulers_lists(reports: Reports) -> None:
    """They have the current lengths; without a scheduler none are read."""
    scheduler = Scheduler()
    queues = QueueLengths(SimpleNamespace(scheduler=scheduler), reports.source)
    reports.source.record_report(SchedulerStats())
    queues()
    scheduler.waiting_queue.append(5)
    queues()
    sent = reports.sent
    del scheduler
    queues()

    assert (sent.num_running_reqs, sent.num_queue_reqs) == (Queued(3), Queued(2))
    assert len(reports.deferred) == 0


@pytest.mark.parametrize(
    "more",
    [
        {"enable_priority_scheduling": True},
        {"disaggregation_mode": SimpleNamespace(value="prefill")},
        {"disaggregation_mode": "PREFILL"},
    ],
)
def test_queue_lengths_come_from_reports_where_lists_do_not_have_them(
    reports: Reports, more: dict[str, Any]
) -> None:
    """This holds by priority, and on a prefill node, whose running batch is never filled."""
    scheduler = Scheduler(**more)
    QueueLengths(SimpleNamespace(scheduler=scheduler), reports.source)()

    assert len(reports.deferred) == 0


def process_families(registry: CollectorRegistry) -> tuple[Any, ...]:
    """Return families that a process counts itself."""
    cpu = Counter("sglang:process_cpu_seconds_total", "Theirs.", ["component"], registry=registry)
    active = Gauge(
        "sglang:http_requests_active", "Theirs.", ["endpoint", "method"], registry=registry
    )
    names = ["name"]
    timed = Histogram(
        "sglang:func_latency_seconds",
        "Theirs.",
        names,
        buckets=ROWS["sglang:func_latency_seconds"].bounds,
        registry=registry,
    )
    Counter("sglang:somebody_elses_total", "Theirs.", registry=registry).inc()
    return cpu, active, timed


def test_families_of_a_process_are_read_as_increases(made: Make, monkeypatch: Any) -> None:
    """Gauges are read as values; families of other owners are ignored."""
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    process = made()
    reader = ProcessFamilies(process)
    cpu, active, timed = process_families(registry)
    shown = Shown(process)
    for _ in range(2):
        cpu.labels("scheduler").inc(1.5)
        active.labels("/generate", "POST").set(2)
        timed.labels("f").observe(0.06)
        timed.labels("f").observe(1e6)
        reader()
        shown.take()
    active.labels("/generate", "POST").dec()
    reader()
    page = shown.page

    assert [info.labels for info in process._infos] == [{}]
    (value,) = page["sglang:process_cpu_seconds"].samples.values()
    assert value == 3
    assert list(page["sglang:http_requests_active"].samples.values()) == [1]
    histogram = page["sglang:func_latency_seconds"].samples
    labels = (("name", "f"),)
    assert histogram["sglang:func_latency_seconds_count", labels] == 4
    assert histogram["sglang:func_latency_seconds_sum", labels] == pytest.approx(2_000_000.12)
    assert "sglang:somebody_elses" not in page
    assert process.deferred.dropped == 0


def test_families_of_collectors_are_not_read_as_well(made: Make, monkeypatch: Any) -> None:
    """A family with a stub is counted once."""
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    process = made()
    cpu, _, _ = process_families(registry)
    collector = SimpleNamespace(labels={}, cpu=cpu)
    wrap(process, collector, "process")
    collector.cpu.labels("scheduler").inc(2)
    ProcessFamilies(process)()
    cpu.labels("scheduler").inc(5)
    ProcessFamilies(process)()
    (value,) = Shown(process).page["sglang:process_cpu_seconds"].samples.values()

    assert value == 2


def python(program: str, **environment: str) -> str:
    """Return the output of ``program`` in a process of its own."""
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parents[2] / "support")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


READING = """
    from prometheus_client import Counter, Gauge, Histogram, values
    from sidestep_adapters.sglang.collectors import Process
    from sidestep_adapters.sglang.readers import ProcessFamilies
    from collectors import ROWS, Shown

    process = Process("ipc://nowhere", "pod", beside=False)
    reader = ProcessFamilies(process)
    cpu = Counter("sglang:process_cpu_seconds_total", "Theirs.", ["component"])
    active = Gauge("sglang:http_requests_active", "Theirs.", ["endpoint", "method"],
                   multiprocess_mode="livesum")
    bounds = ROWS["sglang:func_latency_seconds"].bounds
    timed = Histogram("sglang:func_latency_seconds", "Theirs.", ["name"], buckets=bounds)
    shown = Shown(process)
    for _ in range(2):
        cpu.labels("scheduler").inc(1.5)
        active.labels("/generate", "POST").set(2)
        timed.labels("f").observe(0.5)
        reader()
        shown.take()
    for family in shown.page.values():
        print(*(f"{name}={value:g}" for (name, _), value in family.samples.items()
                if not name.endswith("_bucket")))
"""


def test_multiprocess_values_are_read_the_same_way(tmp_path: Path) -> None:
    """The files are shared by all processes; only this process's values are read."""
    expected = (
        "sglang:http_requests_active=2",
        "sglang:process_cpu_seconds_total=3",
        "sglang:func_latency_seconds_count=2 sglang:func_latency_seconds_sum=1",
    )
    for environment in ({}, {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}):
        assert sorted(python(READING, **environment).splitlines()) == sorted(expected)
    assert list(tmp_path.glob("*.db"))


@pytest.mark.parametrize(
    "module", ["plugin", "taps", "collectors", "readers", "metric_stubs", "deferred_metrics"]
)
def test_sglang_imports_prometheus_client_first(module: str) -> None:
    """SGLang chooses its multiprocess directory before; SGLang itself is not imported either."""
    program = f"""
        import sys, sidestep_adapters.sglang.{module}
        print(*({{"prometheus_client", "sglang", "aiohttp", "asyncio", "click"}} & sys.modules.keys()))
    """

    assert python(program).strip() == ""


FORK = """
    import os
    from collectors import Shown, TokenizerMetricsCollector
    from sidestep_adapters.publisher import process_hooks
    from sidestep_adapters.sglang.collectors import Process, wrap

    process = Process("ipc:///nonexistent/x", "pod", beside=False)
    collector = TokenizerMetricsCollector()
    wrap(process, collector, "tokenizer")
    process.start("sglang/tokenizer")
    process.publisher.close(0.0)
    process.deferred.clear()
    child_of = collector.num_aborted_requests_total.labels(**collector.labels)
    child_of.inc(5)
    child = os.fork()
    if child == 0:
        ours = len(process.deferred)
        child_of.inc(7)
        (value,) = Shown(process).page["sglang:num_aborted_requests"].samples.values()
        os._exit(0 if (ours, value) == (0, 7) else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(process.deferred))
"""


def test_a_forked_child_has_recorded_calls_of_its_own() -> None:
    """The parent's calls stay in the parent; children made before work in both processes."""
    assert python(FORK).split() == ["0", "1"]


def test_every_queue_of_the_stats_may_be_a_number(reports: Reports) -> None:
    """Older releases have numbers for all queues."""
    reports.source.record_report(SimpleNamespace(**dict.fromkeys(QUEUES, 3)))
    sent = reports.sent

    assert [getattr(sent, name) for name in QUEUES] == [Queued(3)] * len(QUEUES)


def test_engines_are_described_before_their_items(made: Make) -> None:
    """Engines that are added later are described as well."""
    process = made()
    described: list[list[EngineInfo]] = []
    process.publisher = SimpleNamespace(  # type: ignore[assignment]
        describe=lambda infos: described.append(list(infos))
    )
    tapped(SchedulerMetricsCollector, "scheduler")
    tapped(TokenizerMetricsCollector, "tokenizer")
    process.publisher = None

    assert [len(infos) for infos in described][-1] == 2
