"""The path of the tap that ``--scheduler-cls`` has always named; the class is in ``vllm.scheduler``."""

from sidestep_adapters.vllm.scheduler import SidestepScheduler

__all__ = ["SidestepScheduler"]
