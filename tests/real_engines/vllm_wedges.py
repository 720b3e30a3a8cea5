"""A vLLM scheduler with a tap, in whose core a test can wedge what it likes.

vLLM imports this module by ``--scheduler-cls vllm_wedges.WedgedScheduler``.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.core import EngineCoreProc
from wedges import (
    hold_gil,
    is_set,
    make_interruptible,
    sleep_while_set,
    spin_while_set,
    wait_for_lock,
)

from sidestep_adapters.vllm.scheduler import SidestepScheduler, _chosen, tapped


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
        make_interruptible()
        scheduler = above_the_tap(tapped(below_the_tap(_chosen(vllm_config))))
        return scheduler(vllm_config, *args, **kwargs)
