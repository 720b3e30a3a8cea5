"""The row of panels about GPUs, from NVIDIA's dcgm-exporter, which several dashboards share."""

from __future__ import annotations

from tools.boards import reasons
from tools.boards.dashboard import Row
from tools.boards.panels import Query
from tools.boards.queries import Scope, most, total
from tools.boards.shapes import lines

SHARED = ("cluster", "namespace", "pod")
"""Labels that dcgm-exporter's series have in common with those of engines."""
EACH = (*SHARED, "Hostname", "gpu")
NAME = "{{cluster}} {{namespace}} {{pod}} {{Hostname}} GPU {{gpu}}"
NEEDS = (
    "Needs dcgm-exporter in the same Prometheus, in Kubernetes with the labels of the pod that uses the"
    " GPU (`honorLabels: true`). Outside of Kubernetes all GPUs are shown."
)


def used(of: Scope, family: str) -> str:
    """Return a family of the GPUs of the pods that have engines which ``of`` selects."""
    matched = ",".join(f'{label}=~"${label}"' for label in SHARED)
    return f"{family}{{{matched}}} and on ({', '.join(SHARED)}) {of('sidestep_engine_up')}"


def gpus(of: Scope) -> Row:
    """Return the row for the GPUs of the pods that have engines which ``of`` selects."""
    return Row(
        "GPUs, from dcgm-exporter",
        (
            lines(
                "GPU utilization",
                f"Share of the time in which a kernel ran, in per cent. {NEEDS}",
                reasons.GPU,
                Query(most(used(of, "DCGM_FI_DEV_GPU_UTIL"), EACH), NAME),
                unit="percent",
                most=100,
            ),
            lines(
                "GPU memory",
                f"Memory of the GPU in use; an engine reserves its KV cache when it starts. {NEEDS}",
                reasons.GPU,
                Query(total(used(of, "DCGM_FI_DEV_FB_USED"), EACH), NAME),
                unit="mbytes",
            ),
            lines(
                "GPU power",
                f"Power draw. {NEEDS}",
                reasons.GPU,
                Query(most(used(of, "DCGM_FI_DEV_POWER_USAGE"), EACH), NAME),
                unit="watt",
            ),
        ),
        collapsed=True,
    )
