"""Compatibility path for ``--scheduler-cls``; the class is in ``vllm.scheduler``."""

from sidestep_adapters.vllm.scheduler import SidestepScheduler

__all__ = ["SidestepScheduler"]
