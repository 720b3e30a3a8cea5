"""A plugin of SGLang with which a test can wedge a scheduler as it likes.

Each wedge lasts as long as a file of its name exists in the folder ``$WEDGES``. SGLang finds the
plugin by an entry point.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
HELD_SECONDS = 40
"""Seconds for which the GIL is held, unless a signal interrupts the C call that holds it."""


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
    # The handler does nothing: a signal that has one interrupts a C call.
    signal.signal(signal.SIGUSR1, lambda *_: None)


def is_set(wedge: str) -> bool:
    """Return whether the test has asked for this wedge."""
    return (Path(os.environ["WEDGES"]) / wedge).exists()


def sleep_while_set(wedge: str) -> None:
    """Sleep until the test releases this wedge."""
    while is_set(wedge):
        time.sleep(0.02)


def wait_for_lock(wedge: str) -> None:
    """Wait for a lock that another thread holds until the test releases this wedge."""
    lock, is_held = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            sleep_while_set(wedge)

    if is_set(wedge):
        threading.Thread(target=hold, daemon=True).start()
        is_held.wait()
        with lock:
            pass


def hold_gil(wedge: str) -> None:
    """Call a C function that sleeps and keeps the GIL."""
    if is_set(wedge):
        ctypes.PyDLL(None).sleep(HELD_SECONDS)


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
