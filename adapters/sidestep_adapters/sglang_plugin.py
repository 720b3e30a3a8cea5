"""The plugin that SGLang loads through the entry-point group ``sglang.srt.plugins``.

It derives SGLang's metric collectors: what they are told is noted and pushed. Without
``SIDESTEP_ENDPOINT`` it does nothing at all: no hook, no socket, no thread.
``SIDESTEP_SGLANG_MODE`` is ``beside`` (SGLang's own metrics stay) or ``instead`` (its
collectors count nothing themselves).

Where SGLang is embedded, ``ServerArgs(stat_loggers=sglang_plugin.stat_loggers())`` does
the same without the entry point. Nothing here imports prometheus_client: SGLang has to
do so first, after it has chosen its multiprocess directory.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sidestep_adapters.environment import endpoint, log_as, mode, namespace, usable_endpoint
from sidestep_adapters.meters import Child, Meter
from sidestep_adapters.notes import Notes
from sidestep_adapters.sglang import Process, StatsSource, wrap
from sidestep_adapters.sglang_readers import OwnFamilies, Queues

log = logging.getLogger(__name__)

OBSERVABILITY = "sglang.srt.observability."
COLLECTORS = OBSERVABILITY + "metrics_collector"
REPORTERS = (
    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter",
    OBSERVABILITY + "scheduler_metrics_mixin.SchedulerMetricsMixin",
)
"""Who reports in a scheduler, of newer releases and of older ones: there the scheduler itself."""
CLASSES = {
    "scheduler": "SchedulerMetricsCollector",
    "tokenizer": "TokenizerMetricsCollector",
    "radix_cache": "RadixCacheMetricsCollector",
    "storage": "StorageMetricsCollector",
}
"""SGLang's collectors by the role under which it looks for others in their place. That of
expert dispatch is not among them: SGLang counts inside its metric, which is read instead."""
RANKS = ("dp_rank", "pp_rank", "tp_rank")

_process: Process | None = None
_classes: dict[tuple[str, type], type] = {}


def plugin() -> None:
    """Register the hooks; runs once in each process of SGLang's."""
    if not usable_endpoint():
        return
    log_as("sglang")
    try:
        _register()
    except Exception:
        log.exception("sidestep: the plugin could not start; the engine goes on without it")


def stat_loggers() -> dict[str, type]:
    """The collectors by role, for ``ServerArgs.stat_loggers``."""
    found = taps(importlib.import_module(COLLECTORS))
    return {role: found[name] for role, name in CLASSES.items() if name in found}


def _register() -> None:
    from sglang.srt.plugins.hook_registry import (  # noqa: PLC0415 - the engine's, if it has one
        HookRegistry,
        HookType,
    )

    collectors = importlib.import_module(COLLECTORS)
    if hasattr(collectors, "resolve_collector_class"):
        HookRegistry.register(f"{COLLECTORS}.resolve_collector_class", _resolved, HookType.AFTER)
    else:
        for name, cls in taps(collectors).items():
            HookRegistry.register(f"{COLLECTORS}.{name}", cls, HookType.REPLACE)
    HookRegistry.register(f"{OBSERVABILITY}cpu_monitor.start_cpu_monitor_thread", _monitored)
    for reporter in REPORTERS:
        if _is_module(reporter.rpartition(".")[0]):
            HookRegistry.register(f"{reporter}.log_batch_result_stats", _iterated)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        # Nor is the package around it.
        return False


def replace_in(collectors: ModuleType) -> None:
    """Replace SGLang's classes where they are defined, before anyone has taken them from there."""
    if usable_endpoint():
        log_as("sglang")
        for name, cls in taps(collectors).items():
            setattr(collectors, name, cls)


def taps(collectors: ModuleType) -> dict[str, type]:
    """What to have in place of the classes of SGLang's module, as far as a release has them."""
    return {
        name: tapped(getattr(collectors, name), role)
        for role, name in CLASSES.items()
        if hasattr(collectors, name)
    }


def _resolved(cls: type, *args: Any, **kwargs: Any) -> type | None:
    """After SGLang has chosen a collector's class; releases differ in what else they pass."""
    role = kwargs.get("role") or next((given for given in args if isinstance(given, str)), "")
    try:
        return tapped(cls, role) if role in CLASSES else None
    except Exception:
        log.exception("sidestep: %s could not be tapped; the engine goes on without it", cls)
        return None


def _monitored(_result: Any, component: str, *_: Any, **__: Any) -> None:
    """After a process began to count its own CPU time: some count nothing else."""
    try:
        own = process()
        if own is not None:
            model, workers = _serving()
            own.start(_stream(component, workers), model)
    except Exception:
        log.warning("sidestep: a process could not be told of", exc_info=True)


def _iterated(_result: Any, reporter: Any, *_: Any, **__: Any) -> None:
    """After an iteration; reports come with a prefill, and every 40 decodes."""
    # An older scheduler without metrics has no such attribute.
    tap = getattr(getattr(reporter, "metrics_collector", None), "sidestep", None)
    if isinstance(tap, SchedulerTap):
        tap.iterated(reporter)


def process() -> Process | None:
    """This process's, made when it is asked for first; None without an endpoint."""
    global _process  # noqa: PLW0603 - one a process
    if _process is None and usable_endpoint():
        beside = mode("SIDESTEP_SGLANG_MODE") == "beside"
        _process = Process(endpoint(), namespace(), beside=beside)
        _process.read(OwnFamilies(_process))
    return _process


def tapped(cls: type, role: str) -> type:
    """``cls`` with our ears; itself, where it has them."""
    if (role, cls) not in _classes:
        if hasattr(cls, "sidestep"):
            return cls
        make = {"scheduler": _scheduler, "tokenizer": _tokenizer}.get(role)
        made = _plain(cls, role) if make is None else make(cls)
        _classes[role, cls] = _classes[role, made] = _named(made, cls)
    return _classes[role, cls]


def _named(made: type, cls: type) -> type:
    """Found here by its name: SGLang sends classes of ``stat_loggers`` to its processes."""
    made.__module__, made.__qualname__ = __name__, f"Sidestep{cls.__name__}"
    made.__name__ = made.__qualname__
    return made


def __getattr__(name: str) -> Any:
    """A class of ``stat_loggers``, in a process that was sent it by name."""
    for role, original in CLASSES.items():
        if name == f"Sidestep{original}":
            return stat_loggers()[role]
    raise AttributeError(name)


class SchedulerTap:
    """What a scheduler's collector holds of ours."""

    def __init__(self, process: Process, collector: Any) -> None:
        made = wrap(process, collector, "scheduler")
        self._process = process
        self.stats: StatsSource = process.stats(collector, "scheduler")
        self._queues: Queues | None = None
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

    def reports(self, collector: Any) -> Callable[[Any], None]:
        """What is called with each report, on the scheduler's loop, in ``log_stats``' place."""
        note, failed, clock = self.stats.note, self._process.notes, time.perf_counter
        others: list[tuple[str, Child]] | None = None

        def log_stats(stats: Any) -> None:
            nonlocal others
            # Without it an idle scheduler reports on every turn of its loop.
            collector.last_log_time = clock()
            try:
                note(stats)
                if others is None:
                    others = self._unknown(stats)
                for name, child in others:
                    value = getattr(stats, name)
                    if value is not None:
                        child.set(getattr(value, "total", value))
            except Exception:  # noqa: BLE001 - nothing here may ever reach the engine
                failed.fail("a report could not be noted")

        return log_stats

    def _unknown(self, stats: Any) -> list[tuple[str, Child]]:
        """Fields that no catalogue knows, of other releases: each has a gauge of its name."""
        return [
            (name, meter.labels(**self._labels))
            for name, meter in self._gauges.items()
            if hasattr(stats, name)
        ]

    def iterated(self, reporter: Any) -> None:
        """On the scheduler's loop: the queues' lengths, two attributes and two lengths."""
        try:
            if self._queues is None:
                self._queues = Queues(reporter, self.stats)
                self._process.read(self._queues)
            self._queues()
        except Exception:  # noqa: BLE001 - SGLang does not catch what a hook raises
            self._process.notes.fail("the queues' lengths could not be read")


def _scheduler(cls: type) -> type:
    class Scheduler(cls):  # type: ignore[misc]
        sidestep: SchedulerTap | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            tap = self.sidestep = _adopted(functools.partial(SchedulerTap, collector=self))
            if tap is None:
                return
            ours = tap.reports(self)
            self.log_stats = _both(ours, super().log_stats) if _is_beside() else ours

    return Scheduler


def _both(ours: Callable[..., None], theirs: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        ours(*args, **kwargs)
        theirs(*args, **kwargs)

    return call


class TokenizerTap:
    """What a tokenizer's collector holds of ours."""

    def __init__(self, process: Process, collector: Any, arguments: Any) -> None:
        native = vars(collector).get("histogram_inter_token_latency")
        made = wrap(process, collector, "tokenizer")
        self.observe = latencies(made["histogram_inter_token_latency"], process.notes)
        if process.beside:
            # It is told by one call below, and has a fast way of its own to count.
            collector.histogram_inter_token_latency = native
        process.start(_stream("tokenizer", _serving(arguments)[1]))


def latencies(meter: Meter, notes: Notes) -> Callable[[dict[str, Any], float, int], None]:
    """What takes each output of a request but its first: the hottest of all calls."""
    queue = notes.queue
    append = queue.append
    has_own = bool(meter.own)

    def observe(labels: dict[str, Any], internval: float, num_new_tokens: int) -> None:
        if num_new_tokens > 0:
            # As ``Notes.of`` does, without a call more.
            if len(queue) < notes.limit:
                key = labels if has_own else ()
                append((meter, key, internval / num_new_tokens, num_new_tokens))
            else:
                notes.lost += 1

    return observe


def _tokenizer(cls: type) -> type:
    class Tokenizer(cls):  # type: ignore[misc]
        sidestep: TokenizerTap | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            arguments = kwargs.get("server_args") or next(iter(args), None)
            tap = self.sidestep = _adopted(
                functools.partial(TokenizerTap, collector=self, arguments=arguments)
            )
            if tap is None:
                return
            native = super().observe_inter_token_latency
            self.observe_inter_token_latency = (
                _both(tap.observe, native) if _is_beside() else tap.observe
            )

    return Tokenizer


def _plain(cls: type, role: str) -> type:
    class Plain(cls):  # type: ignore[misc]
        sidestep: Any = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.sidestep = _adopted(functools.partial(wrap, collector=self, role=role))

    return Plain


def _adopted(make: functools.partial[Any]) -> Any:
    """What ``make`` makes for this process; None where it cannot, and SGLang counts alone."""
    attributes = vars(make.keywords["collector"])
    before = attributes.copy()
    try:
        own = process()
        return None if own is None else make(own)
    except Exception:
        # What was put in the place of its metrics so far counts nothing.
        attributes.clear()
        attributes.update(before)
        log.exception("sidestep: a collector could not be tapped; the engine goes on without it")
        return None


def _is_beside() -> bool:
    return _process is not None and _process.beside


def _serving(arguments: Any = None) -> tuple[str, int]:
    """The served model and the number of tokenizers; ``arguments`` are an older release's."""
    try:
        from sglang.srt.runtime_context import get_serving  # noqa: PLC0415 - newer releases'

        serving = get_serving()
        return str(serving.served_model_name or ""), int(serving.tokenizer_worker_num)
    except Exception:  # noqa: BLE001 - an older release, or one that is not ready
        return "", int(getattr(arguments, "tokenizer_worker_num", 1) or 1)


def _stream(component: str, tokenizers: int) -> str:
    """The process's name; several tokenizers are told apart, though not over restarts."""
    several = component == "tokenizer" and tokenizers > 1
    return f"sglang/{component}/{os.getpid()}" if several else f"sglang/{component}"
