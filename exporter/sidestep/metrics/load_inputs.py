"""What engines tell of their load, read from their series about once a second."""

from __future__ import annotations

import functools
from collections.abc import Callable

from sidestep.catalog.layout import Layout
from sidestep.metrics.engine import Engine
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.registry import Registry
from sidestep.metrics.saturation import Load, Saturation

INTERVAL = 1.0
"""Seconds between two looks at an engine, at least: one that is blocked is so for many."""
AT_ONCE = 32
"""Engines between two turns of the loop: some microseconds each."""

Reader = Callable[[Engine], Load | None]
"""None where the engine does not tell."""


class Loads:
    """Follows how saturated the engines of a registry are that are counted here.

    What another exporter counts that one follows, and tells the ratio.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._due: list[Engine] = []
        self._next = float("-inf")

    def look(self, now: float) -> None:
        """Look at the next engines, some at a time; call it often. ``now`` is monotonic."""
        if not self._due:
            if now < self._next:
                return
            self._next = now + INTERVAL
            self._due = [*self._registry.engines.values()]
        for engine in self._due[-AT_ONCE:]:
            self._follow(engine, now)
        del self._due[-AT_ONCE:]

    def _follow(self, engine: Engine, now: float) -> None:
        if engine.live and not engine.streams:
            # It may be back in a moment; until then its gauges are those of before.
            return
        reader = _reader(engine.layout)
        load = None
        if engine.live and not engine.forwarded and reader is not None:
            load = reader(engine)
        before = engine.saturation and engine.saturation.ratio
        if load is None:
            engine.saturation = None
        else:
            if engine.saturation is None:
                engine.saturation = Saturation()
            engine.saturation.look(now, load)
        if before != (engine.saturation and engine.saturation.ratio):
            self._registry.touch(engine)


@functools.cache
def _reader(layout: Layout) -> Reader | None:
    """How the engines of ``layout`` tell; None where they do not: Triton has no batch of its own."""
    match layout.dialect:
        case "vllm":
            return _vllm(layout)
        case "sglang":
            return _sglang(layout)
    return None


def _vllm(layout: Layout) -> Reader:
    running = layout.find("vllm:num_requests_running").slots[0]
    waiting = layout.find("vllm:num_requests_waiting").slots[0]
    # What waits for an adapter or a transfer does not say that the batch is full.
    capacity = layout.find("vllm:num_requests_waiting_by_reason").slots[0]
    generated = layout.find("vllm:generation_tokens_total").slots[0]
    preempted = layout.find("vllm:num_preemptions_total").slots[0]
    first_tokens = layout.find("vllm:time_to_first_token_seconds").slots[0]

    def read(engine: Engine) -> Load | None:
        values = engine.values
        in_batch, queued, blocked = values[running], values[waiting], values[capacity]
        begun = _count(engine.histograms[first_tokens])
        if in_batch is None or queued is None or blocked is None or begun is None:
            return None
        return Load(
            running=in_batch,
            waiting=blocked,
            begun=begun,
            arrived=begun + queued,
            generated=values[generated] or 0,
            preempted=values[preempted] or 0,
        )

    return read


def _sglang(layout: Layout) -> Reader:
    running = layout.find("sglang:num_running_reqs").slots[0]
    waiting = layout.find("sglang:num_queue_reqs").slots[0]

    def read(engine: Engine) -> Load | None:
        in_batch, queued = engine.keyed[running].get(("",)), engine.keyed[waiting].get(("",))
        begun = _count(_sampled(engine, "sglang:queue_time_seconds"))
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
    found = engine.open.get(family)
    return None if found is None else found.children.get(key)


def _count(found: float | Histogram | None) -> int | None:
    """Observations of a histogram."""
    return sum(found.counts) if isinstance(found, Histogram) else None
