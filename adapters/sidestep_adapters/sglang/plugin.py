"""The plugin that SGLang loads through the entry-point group ``sglang.srt.plugins``.

It makes SGLang use subclasses of its metric collectors. Without ``SIDESTEP_ENDPOINT`` it does
nothing: no hook, no socket, no thread. ``SIDESTEP_SGLANG_MODE`` is ``beside`` (SGLang's own
metrics stay) or ``instead`` (its collectors count nothing themselves).

Where SGLang is embedded, ``ServerArgs(stat_loggers=sglang_plugin.stat_loggers())`` does the
same without the entry point. Nothing here imports prometheus_client: SGLang has to import it
first, after choosing its multiprocess directory.
"""

from __future__ import annotations

import importlib.util
import logging
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from sidestep_adapters.publisher.environment import set_up_log, usable_endpoint
from sidestep_adapters.sglang.outputs import PAYLOAD, RECEIVED, Times, log_own_way, replace_decode
from sidestep_adapters.sglang.taps import (
    CLASSES,
    COLLECTORS,
    SchedulerTap,
    process,
    serving_config,
    stream_name,
    tapped,
    taps,
)

log = logging.getLogger(__name__)

OBSERVABILITY = "sglang.srt.observability."
REPORTERS = (
    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter",
    OBSERVABILITY + "scheduler_metrics_mixin.SchedulerMetricsMixin",
)
"""The class that reports in a scheduler; in older releases the scheduler itself."""


def plugin() -> None:
    """Register the hooks; runs once in each process of SGLang."""
    set_up_log("sglang")
    if not usable_endpoint():
        return
    try:
        _register()
    except Exception:
        log.exception("sidestep: the plugin could not start; the engine runs without it")


def stat_loggers() -> dict[str, type]:
    """Return the collector classes by role, for ``ServerArgs.stat_loggers``."""
    found = taps(importlib.import_module(COLLECTORS))
    return {role: found[name] for role, name in CLASSES.items() if name in found}


def _register() -> None:
    from sglang.srt.plugins.hook_registry import (  # noqa: PLC0415 - only some releases
        HookRegistry,
        HookType,
    )

    collectors = importlib.import_module(COLLECTORS)
    if hasattr(collectors, "resolve_collector_class"):
        HookRegistry.register(
            f"{COLLECTORS}.resolve_collector_class", _after_resolve, HookType.AFTER
        )
    else:
        for name, cls in taps(collectors).items():
            HookRegistry.register(f"{COLLECTORS}.{name}", cls, HookType.REPLACE)
    HookRegistry.register(
        f"{OBSERVABILITY}cpu_monitor.start_cpu_monitor_thread", _after_cpu_monitor_start
    )
    for target, hook in RECORDING.items():
        if _is_module(target.rpartition(".")[0].rpartition(".")[0]):
            HookRegistry.register(target, hook)
    for reporter in REPORTERS:
        if _is_module(reporter.rpartition(".")[0]):
            HookRegistry.register(f"{reporter}.log_batch_result_stats", _after_iteration)
    own = process()
    if own is not None and not own.beside:
        _register_times(HookRegistry.register, HookType)
        try:
            replace_decode()
        except Exception as error:  # noqa: BLE001 - other releases may lack anything
            log_own_way("note the time of each token", error)


def _register_times(register: Callable[..., None], kinds: Any) -> None:
    """Register the hooks of the times of requests, unless the release differs."""
    try:
        times = Times(_is_one_tokenizer)
        hooks = {PAYLOAD: times.send, RECEIVED: times.receive}
        for target in hooks:
            pkgutil.resolve_name(target)
        for target, hook in hooks.items():
            register(target, hook, kinds.AROUND)
    except Exception as error:  # noqa: BLE001 - other releases may lack anything
        log_own_way("send the times of requests", error)


def _is_one_tokenizer() -> bool:
    from sglang.srt.runtime_context import get_serving  # noqa: PLC0415 - newer releases only

    return bool(get_serving().tokenizer_worker_num == 1)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        # The parent package does not exist either.
        return False


def _after_resolve(cls: type, *args: Any, **kwargs: Any) -> type | None:
    """Return the tapped class after SGLang has chosen a collector's class.

    Releases differ in the other arguments that they pass.
    """
    role = kwargs.get("role") or next((given for given in args if isinstance(given, str)), "")
    try:
        return tapped(cls, role) if role in CLASSES else None
    except Exception:
        log.exception("sidestep: %s could not be tapped; the engine runs without the tap", cls)
        return None


def _after_cpu_monitor_start(_: Any, component: str = "", *__: Any, **___: Any) -> None:
    """Start publishing when a process starts to count its CPU time: some count nothing else."""
    try:
        own = process()
        if own is not None:
            model, workers = serving_config()
            own.start(stream_name(component, workers), model)
    except Exception:
        log.warning("sidestep: publishing for a process could not start", exc_info=True)


def _hook(recorder: str, name: str, chosen: Callable[..., Sequence[Any]]) -> Callable[..., None]:
    """Return a hook that calls a method of a recorder of this process with the ``chosen`` arguments."""

    def hook(*args: Any, **kwargs: Any) -> None:
        own = process()
        if own is None or (found := getattr(own, recorder)) is None:
            return
        try:
            getattr(found, name)(*chosen(*args, *kwargs.values()))
        except Exception:  # noqa: BLE001 - SGLang does not catch a hook's exceptions
            if own.limits is not None and own.limits is found:
                # Otherwise the time of the limit that was noted last would grow forever.
                own.limits.paused(False)
                own.limits = None
            own.deferred.fail(f"{recorder} could not be recorded")

    return hook


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
# A hook gets the result of the method that it follows, then the method's arguments.
RECORDING = {
    "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend": _hook(
        "lookups", "began", lambda _result, batch, *_: (batch,)
    ),
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free": _hook(
        "lookups", "released", lambda _result, _pool, request, *_: (request,)
    ),
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.clear": _hook(
        "lookups", "cleared", lambda *_: ()
    ),
    f"{_SCHEDULER}get_next_batch_to_run": _hook(
        "limits", "chosen", lambda plan, scheduler, *_: (plan, scheduler)
    ),
    f"{_SCHEDULER}can_schedule_lora_req": _hook(
        "limits", "considered_adapter", lambda fits, *_: (fits,)
    ),
    f"{_SCHEDULER}pause_generation": _hook("limits", "paused", lambda *_: (True,)),
    f"{_SCHEDULER}continue_generation": _hook("limits", "paused", lambda *_: (False,)),
    "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req": _hook(
        "limits", "considered", lambda result, *_: (result,)
    ),
}
"""Hooks for lookups in the radix cache, and for limits, by the method that they follow."""


def _after_iteration(_result: Any, reporter: Any, *_: Any, **__: Any) -> None:
    """Record queue lengths after an iteration; reports come with a prefill, and every 40 decodes."""
    # Older schedulers without metrics lack the attribute.
    tap = getattr(getattr(reporter, "metrics_collector", None), "sidestep", None)
    if isinstance(tap, SchedulerTap):
        tap.after_iteration(reporter)
