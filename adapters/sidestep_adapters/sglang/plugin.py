"""The plugin that SGLang loads through the entry-point group ``sglang.srt.plugins``.

It has SGLang take classes of ours, derived from its metric collectors. Without
``SIDESTEP_ENDPOINT`` it does nothing at all: no hook, no socket, no thread.
``SIDESTEP_SGLANG_MODE`` is ``beside`` (SGLang's own metrics stay) or ``instead`` (its
collectors count nothing themselves).

Where SGLang is embedded, ``ServerArgs(stat_loggers=sglang_plugin.stat_loggers())`` does
the same without the entry point. Nothing here imports prometheus_client: SGLang has to
do so first, after it has chosen its multiprocess directory.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from sidestep_adapters.publisher.environment import log_as, usable_endpoint
from sidestep_adapters.sglang.taps import (
    CLASSES,
    COLLECTORS,
    SchedulerTap,
    process,
    serving,
    stream_of,
    tapped,
    taps,
)

log = logging.getLogger(__name__)

OBSERVABILITY = "sglang.srt.observability."
REPORTERS = (
    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter",
    OBSERVABILITY + "scheduler_metrics_mixin.SchedulerMetricsMixin",
)
"""Who reports in a scheduler, of newer releases and of older ones: there the scheduler itself."""


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
            model, workers = serving()
            own.start(stream_of(component, workers), model)
    except Exception:
        log.warning("sidestep: a process could not be told of", exc_info=True)


def _iterated(_result: Any, reporter: Any, *_: Any, **__: Any) -> None:
    """After an iteration; reports come with a prefill, and every 40 decodes."""
    # An older scheduler without metrics has no such attribute.
    tap = getattr(getattr(reporter, "metrics_collector", None), "sidestep", None)
    if isinstance(tap, SchedulerTap):
        tap.iterated(reporter)
