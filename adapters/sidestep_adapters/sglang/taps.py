"""Subclasses of SGLang's metric collectors that record what the collectors receive.

The publisher thread makes items of the recorded values. SGLang sends such classes to its
processes by name, which find them here.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sidestep_adapters.publisher.environment import endpoint, mode, namespace, usable_endpoint
from sidestep_adapters.sglang.collectors import Process, StatsRecorder, wrap
from sidestep_adapters.sglang.deferred_metrics import DeferredMetrics
from sidestep_adapters.sglang.metric_stubs import ChildStub, MetricStub
from sidestep_adapters.sglang.readers import ProcessFamilies, QueueLengths

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
        beside = mode("SIDESTEP_SGLANG_MODE") == "beside"
        _process = Process(endpoint(), namespace(), beside=beside)
        _process.add_reader(ProcessFamilies(_process))
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
        make = {"scheduler": _scheduler, "tokenizer": _tokenizer}.get(role)
        made = _plain(cls, role) if make is None else make(cls)
        _classes[role, cls] = _classes[role, made] = _named(made, cls)
    return _classes[role, cls]


def _named(made: type, cls: type) -> type:
    """Name the class so that SGLang's processes find it here: ``stat_loggers`` are sent by name."""
    made.__module__, made.__qualname__ = __name__, f"Sidestep{cls.__name__}"
    made.__name__ = made.__qualname__
    return made


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
        self._process = process
        self.stats: StatsRecorder = process.stats(collector, "scheduler")
        self._queues: QueueLengths | None = None
        self._labels = collector.labels
        self._gauges = (
            {} if process.beside else {n: m for n, m in made.items() if m.kind == "gauge"}
        )
        ranks = ".".join(
            f"{name.removesuffix('_rank')}{collector.labels[name]}"
            for name in RANKS
            if name in collector.labels
        )
        process.start(f"sglang/scheduler/{ranks}")

    def log_stats_function(self, collector: Any) -> Callable[[Any], None]:
        """Return the replacement of ``log_stats``, which runs with each report on the scheduler's loop."""
        record, deferred, clock = (
            self.stats.record_report,
            self._process.deferred,
            time.perf_counter,
        )
        others: list[tuple[str, ChildStub]] | None = None

        def log_stats(stats: Any) -> None:
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
                self._process.add_reader(self._queues)
            self._queues()
        except Exception:  # noqa: BLE001 - SGLang does not catch a hook's exceptions
            self._process.deferred.fail("the queues' lengths could not be read")


def _scheduler(cls: type) -> type:
    class Scheduler(cls):  # type: ignore[misc]
        sidestep: SchedulerTap | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            tap = self.sidestep = _make_tap(functools.partial(SchedulerTap, collector=self))
            if tap is None:
                return
            ours = tap.log_stats_function(self)
            self.log_stats = _call_both(ours, super().log_stats) if _is_beside() else ours

    return Scheduler


def _call_both(ours: Callable[..., None], theirs: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        ours(*args, **kwargs)
        theirs(*args, **kwargs)

    return call


class TokenizerTap:
    """Stubs of a tokenizer's collector."""

    def __init__(self, process: Process, collector: Any, arguments: Any) -> None:
        native = vars(collector).get("histogram_inter_token_latency")
        made = wrap(process, collector, "tokenizer")
        self.observe = latency_recorder(made["histogram_inter_token_latency"], process.deferred)
        if process.beside:
            # SGLang updates it in one call below, by a fast path of its own.
            collector.histogram_inter_token_latency = native
        process.start(stream_name("tokenizer", serving_config(arguments)[1]))


def latency_recorder(
    stub: MetricStub, deferred: DeferredMetrics
) -> Callable[[dict[str, Any], float, int], None]:
    """Return the function that records inter-token latencies, the most frequent call of all."""
    queue = deferred.queue
    append = queue.append
    has_own = bool(stub.own)

    def observe(labels: dict[str, Any], internval: float, num_new_tokens: int) -> None:
        if num_new_tokens > 0:
            # As ``DeferredMetrics.recorder``, inlined to save a call.
            if len(queue) < deferred.limit:
                key = labels if has_own else ()
                append((stub, key, internval / num_new_tokens, num_new_tokens))
            else:
                deferred.dropped += 1

    return observe


def _tokenizer(cls: type) -> type:
    class Tokenizer(cls):  # type: ignore[misc]
        sidestep: TokenizerTap | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            arguments = kwargs.get("server_args") or next(iter(args), None)
            tap = self.sidestep = _make_tap(
                functools.partial(TokenizerTap, collector=self, arguments=arguments)
            )
            if tap is None:
                return
            native = super().observe_inter_token_latency
            self.observe_inter_token_latency = (
                _call_both(tap.observe, native) if _is_beside() else tap.observe
            )

    return Tokenizer


def _plain(cls: type, role: str) -> type:
    class Plain(cls):  # type: ignore[misc]
        sidestep: Any = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.sidestep = _make_tap(functools.partial(wrap, collector=self, role=role))

    return Plain


def _make_tap(make: functools.partial[Any]) -> Any:
    """Return the tap that ``make`` makes; None after an error, when SGLang counts alone."""
    attributes = vars(make.keywords["collector"])
    before = attributes.copy()
    try:
        own = process()
        return None if own is None else make(own)
    except Exception:
        # Restore the metrics that stubs have replaced so far.
        attributes.clear()
        attributes.update(before)
        log.exception("sidestep: a collector could not be tapped; the engine runs without the tap")
        return None


def _is_beside() -> bool:
    return _process is not None and _process.beside


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
