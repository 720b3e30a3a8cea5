"""A vLLM scheduler with a tap, in whose core a test can wedge what it likes.

Each wedge lasts as long as a file of its name exists in the folder ``$WEDGES``. vLLM imports this
module by ``--scheduler-cls vllm_wedges.WedgedScheduler``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from vllm.v1.engine.core import EngineCoreProc

from sidestep_adapters.vllm.scheduler import SidestepScheduler, _chosen, tapped

HELD_SECONDS = 40
"""Seconds for which the GIL is held, unless a signal interrupts the C call that holds it."""


def is_set(wedge: str) -> bool:
    """Return whether the test has asked for this wedge."""
    return (Path(os.environ["WEDGES"]) / wedge).exists()


def sleep_while_set(wedge: str) -> None:
    """Sleep until the test releases this wedge."""
    while is_set(wedge):
        time.sleep(0.02)


def spin_while_set(wedge: str) -> None:
    """Compute until the test releases this wedge, and hand over the GIL only when asked to."""
    while is_set(wedge):
        sum(range(10_000))


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


def below_the_tap(scheduler: Any) -> Any:
    """Return a subclass with the wedges that happen inside a step."""

    class Wedged(scheduler):  # type: ignore[misc]
        max_num_active_reqs: int

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            sleep_while_set("asleep")
            spin_while_set("spinning")
            hold_gil("gil")
            active = self.max_num_active_reqs
            if is_set("admission"):
                self.max_num_active_reqs = 0
            if is_set("recompute"):
                self.reset_prefix_cache(reset_running_requests=True)
            try:
                return super().schedule(*args, **kwargs)
            finally:
                self.max_num_active_reqs = active

        def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
            wait_for_lock("lock_in_step")
            return super().update_from_output(*args, **kwargs)

    return Wedged


def above_the_tap(scheduler: Any) -> Any:
    """Return a subclass with the wedges that happen between steps."""

    class Wedged(scheduler):  # type: ignore[misc]
        def add_request(self, *args: Any, **kwargs: Any) -> Any:
            super().add_request(*args, **kwargs)
            wait_for_lock("lock_between_steps")

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            sleep_while_set("asleep_above_the_tap")
            return super().schedule(*args, **kwargs)

    return Wedged


def wedge_threads() -> None:
    """Give the core's threads of input and output a wedge each."""

    def wedged(function: Any, wedge: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sleep_while_set(wedge)
            return function(*args, **kwargs)

        return call

    core = EngineCoreProc
    core.preprocess_add_request = wedged(core.preprocess_add_request, "input")
    send = wedged(core._send_msg_tracking_payload, "output")
    core._send_msg_tracking_payload = staticmethod(send)


class WedgedScheduler(SidestepScheduler):
    """The scheduler class that vLLM would select, with a tap and with wedges on both sides of it."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of it."""
        wedge_threads()
        # The handler does nothing: a signal that has one interrupts a C call.
        signal.signal(signal.SIGUSR1, lambda *_: None)
        scheduler = above_the_tap(tapped(below_the_tap(_chosen(vllm_config))))
        return scheduler(vllm_config, *args, **kwargs)
