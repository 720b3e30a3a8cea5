"""Readers of SGLang's series: how requests ended, and the engine's load."""

from __future__ import annotations

from sidestep.catalog.dialect import AvailabilityCounts
from sidestep.catalog.layout import Layout
from sidestep.metrics.engine import Engine, Number
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.load_inputs import LoadReader, observation_count
from sidestep.metrics.saturation import Load


def availability_counts(engine: Engine) -> AvailabilityCounts | None:
    """Return how many requests of a tokenizer were served, and how many were not.

    SGLang counts aborted requests among those that finished.
    """
    finished, aborted = (
        _total(engine, f"sglang:num_{name}_total") for name in ("requests", "aborted_requests")
    )
    if finished is None and aborted is None:
        return None
    return max((finished or 0) - (aborted or 0), 0), aborted or 0


def load_reader(layout: Layout) -> LoadReader:
    """Return the function that reads the load of engines with ``layout``."""
    running = layout.find("sglang:num_running_reqs").slots[0]
    waiting = layout.find("sglang:num_queue_reqs").slots[0]

    def read(engine: Engine) -> Load | None:
        in_batch, queued = engine.keyed[running].get(("",)), engine.keyed[waiting].get(("",))
        begun = observation_count(_sampled(engine, "sglang:queue_time_seconds"))
        generated = _sampled(engine, "sglang:realtime_tokens_total", "decode")
        preempted = _sampled(engine, "sglang:num_retracted_requests_total")
        if in_batch is None or queued is None or begun is None:
            return None
        return Load(
            running=in_batch,
            waiting=queued,
            begun=begun,
            arrived=begun + queued,
            generated=generated if isinstance(generated, int | float) else 0,
            preempted=preempted if isinstance(preempted, int | float) else 0,
        )

    return read


def _sampled(engine: Engine, family: str, *key: str) -> float | Histogram | None:
    found = engine.open_families.get(family)
    return None if found is None else found.children.get(key)


def _total(engine: Engine, name: str) -> Number | None:
    family = engine.open_families.get(name)
    if family is None:
        return None
    return sum(n for n in family.children.values() if not isinstance(n, Histogram))
