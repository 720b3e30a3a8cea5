"""An intake with an exporter's default limits."""

from __future__ import annotations

from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.ingest.intake import Intake
from sidestep.metrics.registry import Registry, Tracking
from sidestep.protocol.receiver import Receiver
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.kv_blocks.tracker import Sampling


def make_intake(rate: float = 1.0) -> Intake:
    """Return an intake with the default limits."""
    registry = Registry(DIALECTS.layouts(), tracking=Tracking(sampling=Sampling(rate)))
    applier = Applier(registry)
    return Intake(applier, Receiver(1), SelfMetrics(), clock=lambda: 0.0, wall=lambda: 1.0)
