"""An intake as an exporter has it."""

from __future__ import annotations

from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.dialects import DIALECTS
from sidestep.ingest.intake import Intake
from sidestep.metrics.registry import Registry
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.kv_blocks.sampling import Sampling


def make_intake(rate: float = 1.0) -> Intake:
    """One with the limits that are the defaults."""
    registry = Registry(
        {name: compile_layout(dialect) for name, dialect in DIALECTS.items()},
        {},
        sampling=Sampling(rate),
    )
    return Intake(registry, SelfMetrics(), boot=1, clock=lambda: 0.0, wall=lambda: 1.0)
