"""Ownership of fields where both vLLM's core and its front ends report to the exporter.

The core reports everything that the scheduler decides or sees, a front end the rest. Each
field has one owner, so that nothing is counted twice.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

Role = Literal["alone", "core", "front_end"]
"""Role of a reporting process; ``alone`` is a front end without a tapped core, which owns all."""

SCHEDULER_MODULE = "sidestep_adapters.vllm.scheduler"

FRONT_END = {
    "scheduler": frozenset[str](),
    "iteration": frozenset(
        {"num_not_watermarked_reqs", "num_watermark_skipped_reqs", "num_watermarked_reqs"}
    ),
    "mm_cache": frozenset({"reset", "requests", "queries", "hits"}),
}
"""Fields of a step that a front end owns, besides sleep states, admission rejections and the
families of its own process. All other fields are the core's.
"""

UNOWNED = frozenset({"iteration_details"})
"""Fields that neither reports from the record: the core times its iterations itself."""


def is_tapped(config: Any) -> bool:
    """Return whether a ``VllmConfig`` names sidestep's scheduler, or a class derived from it."""
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


class FrontEndPart:
    """The fields of an iteration that a front end owns, as attributes like those of a stats object."""

    def __init__(self, iteration: Any) -> None:
        for name in FRONT_END["iteration"]:
            setattr(self, name, getattr(iteration, name, 0))

    @property
    def empty(self) -> bool:
        """Return whether there is nothing to count."""
        return not any(vars(self).values())
