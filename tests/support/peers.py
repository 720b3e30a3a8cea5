"""Real publishers that are peers of an exporter."""

from __future__ import annotations

import time

from sidestep.app.exporter import Exporter
from sidestep.engines.vllm.wire import VllmStep
from sidestep.metrics.computed_gauges import scalar
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher

LABELS = {"engine": "0", "model_name": "m"}
ENGINE = EngineInfo("e", "vllm", LABELS)


def count(tokens: int = 1) -> VllmStep:
    """Return a step that generated ``tokens``."""
    iteration = IterationStats(num_generation_tokens=tokens)
    return VllmStep(0, time.monotonic(), time.time(), None, iteration)


def publisher(
    endpoint: str,
    stream: str = "s",
    engine: str = "e",
    bounds: dict[str, list[float]] | None = None,
    info: dict[str, dict[str, str]] | None = None,
    *,
    flush_interval: float = 0.01,
) -> Publisher:
    """Return a publisher of one engine."""
    described = EngineInfo(engine, "vllm", LABELS, info=info or {}, bounds=bounds or {})
    return Publisher(endpoint, stream, [described], flush_interval=flush_interval)


def generated(exporter: Exporter, engine: str = "e") -> int:
    """Return the generated tokens that the exporter has counted for ``engine``."""
    found = exporter.registry.engines.get(engine)
    return 0 if found is None else int(scalar(found, "vllm:generation_tokens_total"))
