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
from sidestep_adapters.notes import LIMIT, Meter, Notes
from sidestep_adapters.sglang import Process, StatsSource, wrap
from sidestep_adapters.sglang_readers import OwnFamilies, Queues

log = logging.getLogger(__name__)

OBSERVABILITY = "sglang.srt.observability."
COLLECTORS = OBSERVABILITY + "metrics_collector"
REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
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
    collectors = importlib.import_module(COLLECTORS)
    return {
        role: tapped(getattr(collectors, name), role)
        for role, name in CLASSES.items()
        if hasattr(collectors, name)
    }


def _register() -> None:
    from sglang.srt.plugins.hook_registry import (  # noqa: PLC0415 - the engine's, if it has one
        HookRegistry,
        HookType,
    )

    collectors = importlib.import_module(COLLECTORS)
    if hasattr(collectors, "resolve_collector_class"):
        HookRegistry.register(f"{COLLECTORS}.resolve_collector_class", _resolved, HookType.AFTER)
    else:
        replace(collectors, HookRegistry.register, HookType.REPLACE)
    HookRegistry.register(f"{OBSERVABILITY}cpu_monitor.start_cpu_monitor_thread", _monitored)
    if importlib.util.find_spec(REPORTER.rpartition(".")[0]) is not None:
        HookRegistry.register(f"{REPORTER}.log_batch_result_stats", _iterated)


def replace(collectors: ModuleType, register: Callable[..., None], kind: Any) -> None:
    """Have SGLang's classes replaced, in releases that do not look for others themselves."""
    for role, name in CLASSES.items():
        if hasattr(collectors, name):
            path = f"{collectors.__name__}.{name}"
            register(path, tapped(getattr(collectors, name), role), kind)


def _resolved(cls: type, role: str, default_cls: type) -> type | None:  # noqa: ARG001 - a hook's
    """After SGLang has chosen a collector's class."""
    return tapped(cls, role) if role in CLASSES else None


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
    tap = getattr(reporter.metrics_collector, "sidestep", None)
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
        wrap(process, collector, "scheduler")
        self._process = process
        self.stats: StatsSource = process.stats(collector, "scheduler")
        self._queues: Queues | None = None
        ranks = ".".join(
            f"{name.removesuffix('_rank')}{collector.labels[name]}"
            for name in RANKS
            if name in collector.labels
        )
        process.start(f"sglang/scheduler/{ranks}")

    def reported(self, stats: Any) -> None:
        """On the scheduler's loop: its report."""
        try:
            self.stats.note(stats)
        except Exception:  # noqa: BLE001 - nothing here may ever reach the engine
            self._process.notes.fail("a report could not be noted")

    def iterated(self, reporter: Any) -> None:
        """On the scheduler's loop: the queues' lengths, two attributes and two lengths."""
        try:
            if self._queues is None:
                self._queues = Queues(reporter, self.stats)
                self._process.read(self._queues)
            self._queues.note()
        except Exception:  # noqa: BLE001 - SGLang does not catch what a hook raises
            self._process.notes.fail("the queues' lengths could not be read")


def _scheduler(cls: type) -> type:
    class Scheduler(cls):  # type: ignore[misc]
        sidestep: SchedulerTap | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.sidestep = _adopted(functools.partial(SchedulerTap, collector=self))
            self._natively = self.sidestep is None or _is_beside()

        def log_stats(self, stats: Any) -> None:
            """Each report of the scheduler."""
            tap = self.sidestep
            if tap is not None:
                tap.reported(stats)
            if self._natively:
                super().log_stats(stats)
            else:
                # Without it an idle scheduler reports on every turn of its loop.
                self.last_log_time = time.perf_counter()

    return Scheduler


class TokenizerTap:
    """What a tokenizer's collector holds of ours."""

    def __init__(self, process: Process, collector: Any) -> None:
        native = vars(collector).get("histogram_inter_token_latency")
        made = wrap(process, collector, "tokenizer")
        self.observe = latencies(made["histogram_inter_token_latency"], process.notes)
        if process.beside:
            # It is told by one call below, and has a fast way of its own to count.
            collector.histogram_inter_token_latency = native
        process.start(_stream("tokenizer", _serving()[1]))


def latencies(meter: Meter, notes: Notes) -> Callable[[dict[str, Any], float, int], None]:
    """What takes each output of a request but its first: the hottest of all calls."""
    queue = notes.queue
    append = queue.append
    has_own = bool(meter.own)

    def observe(labels: dict[str, Any], internval: float, num_new_tokens: int) -> None:
        if num_new_tokens > 0:
            # As ``Notes.of`` does, without a call more.
            if len(queue) < LIMIT:
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
            tap = self.sidestep = _adopted(functools.partial(TokenizerTap, collector=self))
            if tap is None:
                return
            if _is_beside():
                self._observe = tap.observe
                self.observe_inter_token_latency = self._observe_both
            else:
                self.observe_inter_token_latency = tap.observe

        def _observe_both(
            self, labels: dict[str, Any], internval: float, num_new_tokens: int
        ) -> None:
            self._observe(labels, internval, num_new_tokens)
            super().observe_inter_token_latency(labels, internval, num_new_tokens)

    return Tokenizer


def _plain(cls: type, role: str) -> type:
    class Plain(cls):  # type: ignore[misc]
        sidestep: Any = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.sidestep = _adopted(functools.partial(wrap, collector=self, role=role))

    return Plain


def _adopted(make: Callable[[Process], Any]) -> Any:
    """What ``make`` makes for this process; None where it cannot, and SGLang counts alone."""
    try:
        own = process()
        return None if own is None else make(own)
    except Exception:
        log.exception("sidestep: a collector could not be tapped; the engine goes on without it")
        return None


def _is_beside() -> bool:
    return _process is not None and _process.beside


def _serving() -> tuple[str, int]:
    """The served model and the number of tokenizers, where SGLang's release tells."""
    try:
        from sglang.srt.runtime_context import get_serving  # noqa: PLC0415 - newer releases'

        serving = get_serving()
        return str(serving.served_model_name or ""), int(serving.tokenizer_worker_num)
    except Exception:  # noqa: BLE001 - an older release, or one that is not ready
        return "", 1


def _stream(component: str, tokenizers: int) -> str:
    """The process's name; several tokenizers are told apart, though not over restarts."""
    several = component == "tokenizer" and tokenizers > 1
    return f"sglang/{component}/{os.getpid()}" if several else f"sglang/{component}"
