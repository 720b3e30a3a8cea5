"""Who counts what, where vLLM's core is tapped and its front ends have the plugin, too.

The core tells of everything that the scheduler decides or sees; a front end of what
never reaches it. Each field has one owner, so that nothing is counted twice.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

Role = Literal["alone", "core", "front_end"]
"""``alone``: a front end whose engine's core is not tapped; it owns all."""

SCHEDULER_MODULE = "sidestep_adapters.vllm.scheduler"

FRONT_END = {
    "scheduler": frozenset[str](),
    "iteration": frozenset(
        {"num_not_watermarked_reqs", "num_watermark_skipped_reqs", "num_watermarked_reqs"}
    ),
    "mm_cache": frozenset({"reset", "requests", "queries", "hits"}),
}
"""Fields of a step that a front end owns; it owns sleep states, admission rejections and
the families of its own process as well. All other fields are the core's."""

UNOWNED = frozenset({"iteration_details"})
"""The core times its iterations itself: what vLLM attaches after the step is left out."""


def is_tapped(config: Any) -> bool:
    """Whether a ``VllmConfig`` names our scheduler, or one that derives from it."""
    chosen = getattr(getattr(config, "scheduler_config", None), "scheduler_cls", None)
    if isinstance(chosen, str):
        module, _, name = chosen.rpartition(".")
        if module == SCHEDULER_MODULE:
            return True
        if not module or module.startswith("vllm."):
            return False
        try:
            chosen = getattr(importlib.import_module(module), name)
        except Exception:  # noqa: BLE001 - it is vLLM's to complain of it
            return False
    return any(kind.__module__ == SCHEDULER_MODULE for kind in getattr(chosen, "__mro__", ()))


class FrontEndPart:
    """What a front end owns of an iteration; an object of its own, as stats objects are."""

    def __init__(self, iteration: Any) -> None:
        for name in FRONT_END["iteration"]:
            setattr(self, name, getattr(iteration, name, 0))

    @property
    def empty(self) -> bool:
        """Whether there is nothing to count."""
        return not any(vars(self).values())
