"""Ownership of fields where both vLLM's core and its front ends report to the exporter.

The core reports everything that the scheduler decides or sees, a front end the rest. Each
field has one owner, so that nothing is counted twice.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any, Literal

Role = Literal["alone", "core", "front_end"]
"""Role of a reporting process; ``alone`` is a front end without a tapped core, which owns all."""

SCHEDULER_MODULE = "sidestep_adapters.vllm.scheduler"
NEEDED = "add_request", "schedule", "update_from_output", "_free_request"
"""Methods of vLLM's scheduler without which its tap would lack requests, or never see their ends."""

FRONT_END_FIELDS = (
    "num_not_watermarked_reqs",
    "num_watermark_skipped_reqs",
    "num_watermarked_reqs",
)
"""Fields of an iteration that a front end owns, besides the latencies that users see, the multimodal
cache, sleep states, admission rejections and the families of its own process. All other fields are
the core's, except ``iteration_details``, which neither sends: the core times its iterations itself.
"""


_FROM_EVENTS = (
    "scheduler.iteration_details",
    "scheduler.kv_cache_eviction_events",
    "scheduler.running_lora_adapters",
    "scheduler.waiting_lora_adapters",
)
"""Fields of the scheduler's stats that a core does not send, since its events contain the same."""
_LATENCIES = "iteration.time_to_first_tokens_iter", "iteration.finished_requests.e2e_latency"


def is_owned(role: Role, path: str) -> bool:
    """Return whether a process with ``role`` sends the field at ``path``, such as ``scheduler.kv_cache_usage``."""
    part, _, name = path.partition(".")
    if role == "core":
        return part == "scheduler" and not path.startswith(_FROM_EVENTS)
    return role == "alone" or part == "mm_cache" or path in _LATENCIES or name in FRONT_END_FIELDS


def is_tapped(config: Any) -> bool:
    """Return whether a ``VllmConfig`` names sidestep's scheduler, or a class derived from it."""
    vllm_scheduler = sys.modules.get("vllm.v1.core.sched.scheduler")
    if lacked_methods(getattr(vllm_scheduler, "Scheduler", None)):
        return False
    chosen = getattr(getattr(config, "scheduler_config", None), "scheduler_cls", None)
    if isinstance(chosen, str):
        module, _, name = chosen.rpartition(".")
        if module == SCHEDULER_MODULE:
            return True
        if not module or module.startswith("vllm."):
            return False
        try:
            chosen = getattr(importlib.import_module(module), name)
        except Exception:  # noqa: BLE001 - vLLM reports the error itself
            return False
    return any(kind.__module__ == SCHEDULER_MODULE for kind in getattr(chosen, "__mro__", ()))


def lacked_methods(scheduler: Any) -> list[str]:
    """Return the methods that a scheduler lacks for a tap; none if it is not known."""
    return [name for name in NEEDED if scheduler is not None and not hasattr(scheduler, name)]


def has_front_end_part(iteration: Any) -> bool:
    """Return whether an iteration has values that a front end owns: most have none."""
    return (
        any(getattr(iteration, name, 0) for name in FRONT_END_FIELDS)
        or bool(getattr(iteration, "time_to_first_tokens_iter", None))
        or bool(getattr(iteration, "finished_requests", None))
    )


def front_end_part(iteration: Any) -> SimpleNamespace | None:
    """Return the fields of an iteration that a front end owns; None if all are 0."""
    owned = {name: getattr(iteration, name, 0) for name in FRONT_END_FIELDS}
    return SimpleNamespace(**owned) if any(owned.values()) else None


def front_end_latencies(iteration: Any) -> SimpleNamespace | None:
    """Return an iteration's latencies as ``FrontEndLatencies`` has them; None if there are none."""
    begun = getattr(iteration, "time_to_first_tokens_iter", [])
    finished = getattr(iteration, "finished_requests", ())
    ended = [request for request in finished if hasattr(request, "e2e_latency")]
    if not begun and not ended:
        return None
    return SimpleNamespace(
        iteration_timestamp=getattr(iteration, "iteration_timestamp", 0.0),
        time_to_first_tokens=begun,
        e2e_latencies=[request.e2e_latency for request in ended],
        # Negative for a session that continues: it was queued again after its first scheduling.
        queue_times=[max(getattr(request, "queued_time", 0.0), 0.0) for request in ended],
    )
