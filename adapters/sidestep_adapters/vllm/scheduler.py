"""vLLM's scheduler with a tap: ``--scheduler-cls sidestep_adapters.vllm.scheduler.SidestepScheduler``.

It runs inside the engine core, with any front end, and schedules exactly as the scheduler it
derives from. Without ``SIDESTEP_ENDPOINT`` it is that scheduler.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from sidestep_adapters.publisher.environment import set_up_log, usable_endpoint
from sidestep_adapters.vllm.core_recorder import CoreRecorder
from sidestep_adapters.vllm.description import is_supported
from sidestep_adapters.vllm.ownership import is_tapped, lacked_methods

log = logging.getLogger(__name__)

Base: Any = object


class _Tapped(Base):  # type: ignore[misc]
    """Overrides of the methods that a scheduler's events pass through; each calls the original."""

    _core: CoreRecorder | None = None
    _log_to_front_end = True

    def __init__(self, *args: Any, log_stats: bool = False, **kwargs: Any) -> None:
        set_up_log("vllm")
        has_tap = usable_endpoint() and is_supported()
        # The core always records stats; front ends get them only if they asked for them.
        taken = inspect.signature(super().__init__).parameters.values()
        if any(each.name == "log_stats" or each.kind is each.VAR_KEYWORD for each in taken):
            kwargs["log_stats"] = log_stats or has_tap
        super().__init__(*args, **kwargs)
        self._log_to_front_end = log_stats
        if not has_tap:
            return
        if lacking := lacked_methods(super()):
            log.error("sidestep: the scheduler's tap is off: vLLM's has no %s", ", ".join(lacking))
            return
        if log_stats and not is_tapped(self.vllm_config):
            log.error(
                "sidestep: the scheduler's tap is off: front ends cannot see it in --scheduler-cls and"
                " would count the same; name a class that derives from SidestepScheduler there"
            )
            return
        try:
            self._core = CoreRecorder(self, log_stats=log_stats)
        except Exception:
            log.exception(
                "sidestep: the scheduler tap could not start; the scheduler runs without it"
            )

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Return the scheduler's stats, and record them."""
        stats = super().make_stats(*args, **kwargs)
        if self._core is not None and stats is not None:
            self._core.record(stats)
        return stats if self._log_to_front_end else None


CALLS = {
    "add_request": (CoreRecorder.adding, CoreRecorder.added),
    "set_pause_state": (CoreRecorder.is_paused, CoreRecorder.paused),
    "schedule": (CoreRecorder.scheduling, CoreRecorder.scheduled),
    "update_from_output": (CoreRecorder.updating, CoreRecorder.updated),
    "_free_request": (None, CoreRecorder.freed),
    "_preempt_request": (None, CoreRecorder.preempted),
    "_set_kv_fetch_stage": (None, CoreRecorder.fetching),
    "_update_request_as_session": (None, CoreRecorder.continued),
    "reset_prefix_cache": (None, CoreRecorder.cleared),
    "shutdown": (None, CoreRecorder.shut_down),
}
"""Calls before and after methods of the scheduler, which may have other parameters and results in other
releases. The latter gets what the former returned, the result, the scheduler and the arguments.
"""


def _override(name: str, before: Any, after: Any) -> Callable[..., Any]:
    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        original, core = getattr(super(_Tapped, self), name), self._core
        if core is None:
            return original(*args, **kwargs)
        call = self, *((core.note(_in_order, original, args, kwargs) or ()) if kwargs else args)
        noted = None if before is None else core.note(before, core, *call)
        result = original(*args, **kwargs)
        core.note(after, core, noted, result, *call)
        return result

    return override


def _in_order(method: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the arguments of a call in the order of the method's parameters."""
    return tuple(inspect.signature(method).bind(*args, **kwargs).arguments.values())


for _name, _records in CALLS.items():
    setattr(_Tapped, _name, _override(_name, *_records))


class SidestepScheduler:
    """The tapped form of the scheduler class that vLLM would select."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of a class that derives from vLLM's own."""
        return tapped(_chosen(vllm_config))(vllm_config, *args, **kwargs)


@functools.cache
def tapped(scheduler: type[Scheduler]) -> Any:
    """Return a subclass of ``scheduler`` with a tap."""
    return type(f"Sidestep{scheduler.__name__}", (_Tapped, scheduler), {"__module__": __name__})


def _chosen(config: Any) -> Any:
    """Return the class that ``get_scheduler_cls`` would select without ``--scheduler-cls``."""
    asynchronous = bool(getattr(config.scheduler_config, "async_scheduling", False))
    if getattr(config, "diffusion_config", None) is not None:
        from vllm.v1.core.sched import diffusion_scheduler  # noqa: PLC0415 - only some releases

        name = "DiffusionAsyncScheduler" if asynchronous else "DiffusionScheduler"
        return getattr(diffusion_scheduler, name)
    if asynchronous:
        try:
            from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: PLC0415
        except ImportError:
            without = copy.copy(config.scheduler_config)
            without.scheduler_cls = None
            return without.get_scheduler_cls()
        return AsyncScheduler
    return Scheduler
