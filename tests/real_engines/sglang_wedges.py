"""A plugin of SGLang with which a test can wedge a scheduler as it likes.

SGLang finds it by an entry point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wedges import hold_gil, is_set, make_interruptible, sleep_while_set, wait_for_lock

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."


def plugin() -> None:
    """Register the hooks; runs once in each process of SGLang."""
    from sglang.srt.plugins.hook_registry import (  # noqa: PLC0415 - only SGLang has it
        HookRegistry,
        HookType,
    )

    hooks = {
        "run_batch": _run_batch,
        "process_batch_result": _process_batch_result,
        "process_input_requests": _process_input_requests,
        "get_next_batch_to_run": _get_next_batch_to_run,
        "_get_new_batch_prefill_raw": _get_new_batch_prefill,
    }
    for name, hook in hooks.items():
        HookRegistry.register(SCHEDULER + name, hook, HookType.AROUND)
    make_interruptible()


def _run_batch(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    sleep_while_set("asleep")
    hold_gil("gil")
    return call(*args, **kwargs)


def _process_batch_result(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    wait_for_lock("lock_in_step")
    return call(*args, **kwargs)


def _process_input_requests(
    call: Callable[..., Any], scheduler: Any, requests: Any, *args: Any, **kwargs: Any
) -> Any:
    if requests:
        sleep_while_set("input")
    return call(scheduler, requests, *args, **kwargs)


def _get_next_batch_to_run(
    call: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    if scheduler.waiting_queue:
        wait_for_lock("lock_between_steps")
    # The loop ends, and with it the process, without an error.
    scheduler.gracefully_exit |= is_set("exit")
    return call(scheduler, *args, **kwargs)


def _get_new_batch_prefill(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if is_set("admission"):
        return None, kwargs["running_batch"]
    return call(*args, **kwargs)
