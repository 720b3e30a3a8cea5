"""A page in the form of dcgm-exporter's, for machines without a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager

from growing_page import growing_page

GPU = 'gpu="0",UUID="GPU-0",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="node-1"'
PAGE = f"""\
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{{{GPU}}} 97
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{{{GPU}}} 612.5
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{{{GPU}}} 73210
"""


def dcgm_exporter() -> AbstractContextManager[str]:
    """Serve the page, and yield its URL; gauges do not grow."""
    return growing_page(PAGE)
