"""Subclasses of SGLang's metric collectors that record what the collectors receive.

The publisher thread makes items of the recorded values. SGLang sends such classes to its
processes by name, which find them here.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from sidestep_adapters.publisher.environment import (
    MODES,
    choice,
    endpoint,
    namespace,
    usable_endpoint,
)
from sidestep_adapters.publisher.request_identity import identity_maker
from sidestep_adapters.sglang.collectors import adding_copy, native_copy, wrap
from sidestep_adapters.sglang.limits import LimitRecorder
from sidestep_adapters.sglang.lookups import LookupRecorder
from sidestep_adapters.sglang.metric_stubs import ChildStub, MetricStub
from sidestep_adapters.sglang.outputs import Latencies
from sidestep_adapters.sglang.process import Process, ProcessFamilies
from sidestep_adapters.sglang.progress import SchedulerProgress, TokenizerProgress, constructing
from sidestep_adapters.sglang.request_hooks import record_counted, record_uncounted
from sidestep_adapters.sglang.requests import RequestRecorder
from sidestep_adapters.sglang.stats import QueueLengths, StatsRecorder

log = logging.getLogger(__name__)

COLLECTORS = "sglang.srt.observability.metrics_collector"
CLASSES = {
    "scheduler": "SchedulerMetricsCollector",
    "tokenizer": "TokenizerMetricsCollector",
    "radix_cache": "RadixCacheMetricsCollector",
    "storage": "StorageMetricsCollector",
}
"""SGLang's collectors by the role under which it looks up replacements. Expert dispatch has none:
SGLang counts inside that metric, which is read instead.
"""
RANKS = ("dp_rank", "pp_rank", "tp_rank")

_process: Process | None = None
_classes: dict[tuple[str, type], type] = {}


def process() -> Process | None:
    """Return this process's ``Process``, made on first use; None without an endpoint."""
    global _process  # noqa: PLW0603 - one a process
    if _process is None and usable_endpoint():
        beside = choice("SIDESTEP_SGLANG_MODE", MODES) == "beside"
        _process = Process(endpoint(), namespace(), beside=beside)
        _process.readers.append(ProcessFamilies(_process))
    return _process


def taps(collectors: ModuleType) -> dict[str, type]:
    """Return the tapped classes by the name of SGLang's class, as far as a release has them."""
    return {
        name: tapped(getattr(collectors, name), role)
        for role, name in CLASSES.items()
        if hasattr(collectors, name)
    }


def tapped(cls: type, role: str) -> type:
    """Return a tapped subclass of ``cls``; ``cls`` itself if it is one."""
    if (role, cls) not in _classes:
        if hasattr(cls, "sidestep"):
            return cls
        made = _subclass(cls, role)
        _classes[role, cls] = _classes[role, made] = made
    return _classes[role, cls]


def _subclass(cls: type, role: str) -> type:
    class Tapped(cls):  # type: ignore[misc]
        sidestep: Any = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.sidestep = _tap(self, role, kwargs.get("server_args") or next(iter(args), None))

    # SGLang's processes find it here by this name: ``stat_loggers`` are sent by name.
    Tapped.__module__, Tapped.__qualname__ = __name__, f"Sidestep{cls.__name__}"
    Tapped.__name__ = Tapped.__qualname__
    return Tapped


def _tap(collector: Any, role: str, server_args: Any) -> Any:
    """Tap ``collector`` and return its tap; None after an error, when SGLang counts alone."""
    attributes = vars(collector)
    before = attributes.copy()
    try:
        own = process()
        if own is None:
            return None
        if role == "scheduler":
            return SchedulerTap(own, collector)
        if role == "tokenizer":
            return _tap_tokenizer(own, collector, server_args)
        return wrap(own, collector, role)
    except Exception:
        # Restore what has been replaced so far.
        attributes.clear()
        attributes.update(before)
        log.exception("sidestep: a collector could not be tapped; the engine runs without the tap")
        if _process is not None:
            _process.count_failure()
        return None


def __getattr__(name: str) -> Any:
    """Return a class of ``taps`` in a process that received it by name."""
    for original in CLASSES.values():
        if name == f"Sidestep{original}":
            return taps(importlib.import_module(COLLECTORS))[original]
    raise AttributeError(name)


class SchedulerTap:
    """Stubs and readers of a scheduler's collector."""

    def __init__(self, process: Process, collector: Any) -> None:
        made = wrap(process, collector, "scheduler")
        engine = process.engine("scheduler", collector.labels)
        self._process = process
        missing = partial(process.describe_missing, engine)
        self.stats = StatsRecorder(process.deferred, engine, missing)
        process.sources.append(self.stats)
        self._queues: QueueLengths | None = None
        self._labels = collector.labels
        _report_progress(process, collector, "scheduler", SchedulerProgress)
        process.limits = limits = LimitRecorder(process.deferred, engine)
        process.sources += limits.gauges
        process.readers.append(limits)
        # The ranks of a replica see the same requests.
        if _is_first_rank(collector.labels):
            process.lookups = LookupRecorder(process.deferred, engine, lambda: process.publisher)
        self._gauges = (
            {} if process.beside else {n: m for n, m in made.items() if m.kind == "gauge"}
        )
        ranks = ".".join(
            f"{name.removesuffix('_rank')}{collector.labels[name]}"
            for name in RANKS
            if name in collector.labels
        )
        process.start(f"sglang/scheduler/{ranks}")
        log_stats = self._log_stats(collector)
        collector.log_stats = (
            _call_both(log_stats, collector.log_stats) if process.beside else log_stats
        )

    def _log_stats(self, collector: Any) -> Callable[[Any], None]:
        """Return the replacement of ``log_stats``, which runs with each report on the scheduler's loop."""
        record, deferred = self.stats.record_report, self._process.deferred
        clock = time.perf_counter
        others: list[tuple[str, ChildStub]] | None = None

        def log_stats(stats: Any, *_: Any, **__: Any) -> None:
            nonlocal others
            # Otherwise an idle scheduler reports in every iteration of its loop.
            collector.last_log_time = clock()
            try:
                record(stats)
                if others is None:
                    others = self._uncatalogued(stats)
                for name, child in others:
                    value = getattr(stats, name)
                    if value is not None:
                        child.set(getattr(value, "total", value))
            except Exception:  # noqa: BLE001 - no exception may reach the engine
                deferred.fail("a report could not be recorded")

        return log_stats

    def _uncatalogued(self, stats: Any) -> list[tuple[str, ChildStub]]:
        """Return fields of other releases that the catalogue lacks; each has a gauge of its name."""
        return [
            (name, stub.labels(**self._labels))
            for name, stub in self._gauges.items()
            if hasattr(stats, name)
        ]

    def after_iteration(self, reporter: Any) -> None:
        """Record the queue lengths on the scheduler's loop: two attributes and two lengths."""
        try:
            if self._queues is None:
                self._queues = QueueLengths(reporter, self.stats)
                self._process.readers.append(self._queues)
            self._queues()
        except Exception:  # noqa: BLE001 - SGLang does not catch a hook's exceptions
            self._process.deferred.fail("the queues' lengths could not be read")


def _is_first_rank(labels: Mapping[str, Any]) -> bool:
    """Return whether this scheduler is the first of those that share a radix cache's content."""
    try:
        from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - newer releases only

        parallel = get_parallel()
        ranks = (parallel.pp_rank, parallel.attn_tp_rank, parallel.attn_cp_rank)
    except Exception:  # noqa: BLE001 - an older release
        ranks = tuple(labels.get(name, 0) for name in ("pp_rank", "tp_rank"))
    return all(str(rank) == "0" for rank in ranks)


def _call_both(ours: Callable[..., None], theirs: Callable[..., None]) -> Callable[..., None]:

    def call(*args: Any, **kwargs: Any) -> None:
        ours(*args, **kwargs)
        theirs(*args, **kwargs)

    return call


def _tap_tokenizer(process: Process, collector: Any, server_args: Any) -> dict[str, MetricStub]:
    native = vars(collector).get("histogram_inter_token_latency")
    made = wrap(process, collector, "tokenizer")
    latencies = Latencies(
        made["histogram_inter_token_latency"],
        process.deferred,
        inspect.signature(collector.observe_inter_token_latency),
    )
    observe = latencies.observe
    if process.beside:
        # SGLang updates it in this call, by a fast path of its own.
        collector.histogram_inter_token_latency = native
        observe = _call_both(observe, collector.observe_inter_token_latency)
    collector.observe_inter_token_latency = observe
    _report_progress(process, collector, "tokenizer", TokenizerProgress)
    manager = constructing(TokenizerProgress.method)
    _record_requests(process, collector, made, manager)
    process.start(stream_name("tokenizer", serving_config(server_args)[1]))
    if manager is not None and not process.beside:
        latencies.replace_in(manager)
    return made


def _report_progress(
    process: Process, collector: Any, role: str, kind: type[SchedulerProgress | TokenizerProgress]
) -> None:
    """Report the progress of the object that is constructing ``collector``, if it is SGLang's."""
    try:
        owner = constructing(kind.method)
        if owner is not None:
            process.measures.append(kind(owner, process.engine(role, collector.labels)))
    except Exception:
        log.exception("sidestep: the %s was not found; its progress is not reported", role)
        process.count_failure()


def _record_requests(
    process: Process, collector: Any, stubs: dict[str, MetricStub], manager: Any
) -> None:
    engine = process.engine("tokenizer", collector.labels)
    recorder = RequestRecorder(process.deferred, engine, stubs, identity_maker())
    try:
        native = native_copy(collector) if process.beside else None
        record_counted(recorder, collector, adding_copy(collector), native)
        if manager is not None:
            record_uncounted(recorder, manager)
    except AttributeError as error:
        log.warning(
            "sidestep: not all requests get records in this release of SGLang: %s", str(error)
        )


def serving_config(arguments: Any = None) -> tuple[str, int]:
    """Return the served model and the number of tokenizers.

    ``arguments`` are the server arguments of older releases.
    """
    try:
        from sglang.srt.runtime_context import get_serving  # noqa: PLC0415 - newer releases only

        known = get_serving()
        return str(known.served_model_name or ""), int(known.tokenizer_worker_num)
    except Exception:  # noqa: BLE001 - an older release, or a server that is not ready
        return "", int(getattr(arguments, "tokenizer_worker_num", 1) or 1)


def stream_name(component: str, tokenizers: int) -> str:
    """Return the process's stream name; several tokenizers are distinguished by process id."""
    several = component == "tokenizer" and tokenizers > 1
    return f"sglang/{component}/{os.getpid()}" if several else f"sglang/{component}"
