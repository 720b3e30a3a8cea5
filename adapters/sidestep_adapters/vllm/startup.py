"""Start-up times of vLLM's processes, as far as vLLM keeps them or their age shows them.

vLLM measures the loading of weights, the profiling run and the capture of CUDA graphs in its workers,
and keeps none of these: they are in its log, and in its traces with ``--otlp-traces-endpoint``.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from sidestep.protocol.limits import VALUE_LIMIT
from sidestep.protocol.self_described import Family, Sample
from sidestep_adapters.publisher.process_metrics import process_age

CORE_PROCESS = "EngineCore"
"""Beginning of the names of the processes that vLLM starts for its cores."""
COMPILE_TIMES = {"compile": "compilation_time", "compile_encoder": "encoder_compilation_time"}
"""Attributes of vLLM's compilation configuration by phase: seconds of the slowest worker."""


def core_startup(config: Any) -> list[Family]:
    """Return the start-up times of an engine core that is making its scheduler.

    vLLM makes it when all workers have loaded, compiled and warmed up. Only a process that vLLM
    started for the core has an age that is the core's.
    """
    compilation = getattr(config, "compilation_config", None)
    phases = {name: getattr(compilation, at, 0.0) for name, at in COMPILE_TIMES.items()}
    if multiprocessing.current_process().name.startswith(CORE_PROCESS):
        phases["core"] = process_age()
    return _families(phases)


def front_end_startup() -> list[Family]:
    """Return the start-up time of a front end whose engines are ready now."""
    return _families({"front_end": process_age()})


def _families(phases: dict[str, Any]) -> list[Family]:
    """Return the family of the phases that took time; 0 seconds: the engine did not compile."""
    samples = [
        Sample([phase], float(seconds))
        for phase, seconds in phases.items()
        if isinstance(seconds, int | float) and 0 < seconds <= VALUE_LIMIT
    ]
    return [Family("sidestep_startup_seconds", "gauge", ["phase"], samples)] if samples else []
