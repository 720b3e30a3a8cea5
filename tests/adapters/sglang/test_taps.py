"""Tapped collectors of SGLang: the exporter's page equals the one that they would have had."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import Counter, Gauge, Histogram

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
    Unpublished,
    same,
)
from python_programs import run_python
from sidestep.protocol.self_described import Samples
from sidestep_adapters.sglang import plugin as sglang_plugin
from sidestep_adapters.sglang import taps as sglang_taps
from sidestep_adapters.sglang.collectors import wrap
from sidestep_adapters.sglang.process import Process

RANKED = {name: str(value) for name, value in RANK.items()}


@pytest.fixture
def beside() -> bool:
    """Return whether SGLang's own objects keep counting."""
    return False


@pytest.fixture
def process(beside: bool, monkeypatch: pytest.MonkeyPatch) -> Unpublished:
    """Return the records of this process, which tapped collectors use."""
    made = Unpublished(beside=beside)
    monkeypatch.setattr(sglang_taps, "_process", made)
    return made


def tapped(cls: type, role: str, *args: Any, **kwargs: Any) -> Any:
    """Return a collector as the plugin makes SGLang create it."""
    return sglang_taps.tapped(cls, role)(*args, **kwargs)


def plain_pair() -> tuple[SchedulerMetricsCollector, TokenizerMetricsCollector]:
    """Return a scheduler's and a tokenizer's collector as without the plugin."""
    return SchedulerMetricsCollector(), TokenizerMetricsCollector()


def tapped_pair() -> tuple[Any, Any]:
    """Return a scheduler's and a tokenizer's collector, tapped."""
    scheduler = tapped(SchedulerMetricsCollector, "scheduler")
    return scheduler, tapped(TokenizerMetricsCollector, "tokenizer")


# Calls that SGLang makes, as (method, arguments), to a scheduler's and a tokenizer's collector.
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
@example(calls=[], asked=[])
@example(calls=[("observe_dp_balance", 4, 0.25)], asked=[("later", 0.3, 3)])
@given(
    calls=st.lists(scheduler_calls | bare_calls | st.just(("flush",)), max_size=40),
    asked=st.lists(tokenizer_calls, max_size=20),
)
def test_pages_are_equal_for_any_calls(
    beside: bool, calls: list[tuple[Any, ...]], asked: list[tuple[Any, ...]]
) -> None:
    """SGLang's own collectors and the tapped ones, in both modes, get the same calls.

    Children exist at 0 before any call, and those that a collector looked up in its constructor
    are replaced, too.
    """
    process = Unpublished(beside=beside)
    theirs = plain_pair()
    untouched = [collector.page for collector in theirs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_taps, "_process", process)
        ours = tapped_pair()
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
    native = [collector.page for collector in theirs]

    same({**native[0], **native[1]}, shown.page)
    assert [collector.page for collector in ours] == (native if beside else untouched)
    assert process.deferred.dropped == 0


@pytest.mark.usefixtures("process")
def test_a_report_sets_the_time_of_the_last_one() -> None:
    """Without it an idle scheduler would report in every iteration of its loop."""
    scheduler = tapped(SchedulerMetricsCollector, "scheduler")
    scheduler.last_log_time = 0.0
    scheduler.log_stats(SchedulerStats())

    assert scheduler.last_log_time > 0


def test_only_configured_bounds_are_sent(process: Process) -> None:
    """The exporter has the defaults; the buckets equal SGLang's."""
    bounds = {"sglang:inter_token_latency_seconds": [0.5, 1.0, 2.0]}
    tapped(SchedulerMetricsCollector, "scheduler")
    tokenizer = tapped(TokenizerMetricsCollector, "tokenizer", TOKENIZER, bounds)
    tokenizer.observe_inter_token_latency(dict(TOKENIZER), 1.5, 2)

    assert [info.bounds for info in process._infos] == [
        {},
        {"sglang_inter_token_latency": [0.5, 1.0, 2.0]},
    ]
    samples = Shown(process).page["sglang:inter_token_latency_seconds"].samples
    assert [v for (name, _), v in samples.items() if name.endswith("_bucket")] == [0, 2, 2, 2]


def test_unknown_families_describe_themselves(process: Process) -> None:
    """Families of another release are sent with help and bounds, for each kind."""
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


def test_collectors_of_equal_labels_are_one_engine(process: Process) -> None:
    """Equal labels are one series on SGLang's own page; other ranks are other engines."""
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


def test_one_rank_of_a_replica_sends_lookups(process: Process) -> None:
    """The others see the same requests; replicas have caches of their own."""
    for rank, replica, sends in ((1, 0, False), (0, 0, True), (0, 1, True)):
        process.lookups = None
        labels = {**RANK, "tp_rank": rank, "dp_rank": replica}
        tapped(SchedulerMetricsCollector, "scheduler", labels)
        assert (process.lookups is not None) == sends


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

    assert replaced == {
        f"{sglang_taps.COLLECTORS}.{cls.__name__}": sglang_taps.tapped(cls, role)
        for cls, role in (
            (SchedulerMetricsCollector, "scheduler"),
            (TokenizerMetricsCollector, "tokenizer"),
        )
    }


class Older(SchedulerMetricsCollector):
    """A release that reports more fields, and has gauges instead of histograms."""

    MORE = ("engine_startup_time", "kv_transfer_latency_ms", "num_next_reqs")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in self.MORE:
            made = Gauge(f"sglang:{name}", "Theirs.", [*self.labels], registry=self.registry)
            vars(self)[name] = made

    def log_stats(self, stats: Any) -> None:
        """Report more fields."""
        super().log_stats(stats)
        for name in self.MORE:
            value = getattr(stats, name)
            if value is not None:
                vars(self)[name].labels(**self.labels).set(getattr(value, "total", value))


@pytest.mark.parametrize("beside", [False, True])
def test_reports_of_other_releases_lose_nothing(process: Process) -> None:
    """A field without a catalogue entry has a gauge of its name; one of another kind is left out."""
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


@pytest.mark.usefixtures("process")
def test_a_failed_tap_leaves_the_collector_unchanged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang counts alone, and the error is logged."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(Process, "engine", broken)
    plain, found = plain_pair(), tapped_pair()
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


def test_nothing_that_a_tap_raises_reaches_the_engine(process: Unpublished) -> None:
    """Reports without fields, reporters without a scheduler and invalid amounts are counted."""
    scheduler, tokenizer = tapped_pair()
    scheduler.log_stats(object())
    sglang_plugin._after_iteration(None, SimpleNamespace(metrics_collector=scheduler))
    sglang_plugin._after_iteration(None, SimpleNamespace(metrics_collector=None))
    scheduler.increment_realtime_tokens("decode", "many")
    tokenizer.observe_inter_token_latency(object(), 0.3, 3)
    Shown(process).take()

    assert len(process.failures) == 3


def test_latencies_beyond_the_limit_are_counted_as_dropped(process: Process) -> None:
    """The most frequent call has lists of its own, with the limit of the queue."""
    tokenizer = tapped(TokenizerMetricsCollector, "tokenizer")
    process.deferred.clear()
    process.deferred.limit = 5
    for _ in range(9):
        tokenizer.observe_inter_token_latency(dict(TOKENIZER), 0.3, 1)

    assert process.deferred.dropped == 4
    latencies = Shown(process).page["sglang:inter_token_latency_seconds"].samples
    assert [5] == [n for (name, _), n in latencies.items() if name.endswith("_count")]


def test_sglang_imports_prometheus_client_first() -> None:
    """SGLang chooses its multiprocess directory before; SGLang itself is not imported either."""
    program = """
        import sys, sidestep_adapters.sglang.plugin, sidestep_adapters.sglang.taps
        print(*({"prometheus_client", "sglang", "aiohttp", "asyncio", "click"} & sys.modules.keys()))
    """

    assert run_python(program).strip() == ""


FORK = """
    import os
    from collectors import Shown, TokenizerMetricsCollector
    from sidestep_adapters.sglang.collectors import wrap
    from sidestep_adapters.sglang.process import Process

    process = Process("ipc:///nonexistent/x", "pod", beside=False)
    collector = TokenizerMetricsCollector()
    wrap(process, collector, "tokenizer")
    process.start("sglang/tokenizer")
    process.publisher.close(0.0)
    process.deferred.clear()
    child_of = collector.num_aborted_requests_total.labels(**collector.labels)
    child_of.inc(5)
    observe = collector.histogram_inter_token_latency.observer(collector.labels)
    observe(0.5, 3)
    child = os.fork()
    if child == 0:
        ours = len(process.deferred)
        child_of.inc(7)
        page = Shown(process).page
        (value,) = page["sglang:num_aborted_requests"].samples.values()
        is_own = "sglang:inter_token_latency_seconds" not in page
        os._exit(0 if (ours, value, is_own) == (0, 7, True) else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(process.deferred))
"""


def test_a_forked_child_has_recorded_calls_of_its_own() -> None:
    """The parent's calls stay in the parent; children made before work in both processes."""
    assert run_python(FORK).split() == ["0", "2"]
