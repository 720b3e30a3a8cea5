"""Readers of vLLM's series: how requests ended, and the engine's load."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter

from sidestep.catalog.dialect import AvailabilityCounts
from sidestep.catalog.layout import Layout
from sidestep.metrics.engine import Engine, Number
from sidestep.metrics.load_inputs import LoadReader, observation_count
from sidestep.metrics.saturation import Load

Counters = Callable[[Sequence[Number | None]], Sequence[Number | None]]
FAILED = ("abort", "error")
"""Finish reasons that count as failures."""


def availability_counts(engine: Engine) -> AvailabilityCounts:
    """Return how many requests were served, and how many were not."""
    # This runs for a thousand engines in one slice of the event loop, hence no Python loop.
    served, failed = _counters(engine.layout)
    values = engine.values
    return sum(filter(None, served(values))), sum(filter(None, failed(values)))


@functools.cache
def _counters(layout: Layout) -> tuple[Counters, Counters]:
    """Return getters for the counts of requests that were served, and of those that were not."""
    ends, rejections = map(
        layout.find, ("vllm:request_success_total", "vllm:admission_rejections_total")
    )
    failed = [ends.slots[ends.row.closed.index(reason)] for reason in FAILED]
    served = [slot for slot in ends.slots if slot not in failed]
    return itemgetter(*served), itemgetter(*failed, *rejections.slots)


def load_reader(layout: Layout) -> LoadReader:
    """Return the function that reads the load of engines with ``layout``."""
    running = layout.find("vllm:num_requests_running").slots[0]
    waiting = layout.find("vllm:num_requests_waiting").slots[0]
    # Requests that wait for an adapter or a transfer do not imply that the batch is full.
    capacity = layout.find("vllm:num_requests_waiting_by_reason").slots[0]
    generated = layout.find("vllm:generation_tokens_total").slots[0]
    preempted = layout.find("vllm:num_preemptions_total").slots[0]
    first_tokens = layout.find("vllm:time_to_first_token_seconds").slots[0]

    def read(engine: Engine) -> Load | None:
        values = engine.values
        in_batch, queued, blocked = values[running], values[waiting], values[capacity]
        begun = observation_count(engine.histograms[first_tokens])
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
