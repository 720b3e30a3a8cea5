"""A publisher of one engine, and a step of it."""

from __future__ import annotations

import time

from sidestep.engines.vllm.wire import VllmStep
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher

ENGINE = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})


def step(tokens: int = 1) -> VllmStep:
    """Return a step that generated ``tokens``."""
    iteration = IterationStats(num_generation_tokens=tokens)
    return VllmStep(0, time.monotonic(), time.time(), None, iteration)


def publisher(endpoint: str, stream: str = "s") -> Publisher:
    """Return a publisher of one engine."""
    return Publisher(endpoint, stream, [ENGINE], flush_interval=0.01)
