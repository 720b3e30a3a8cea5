"""Readers of vLLM's series: how requests ended, and gauges that former releases had."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from sidestep.catalog.dialect import AvailabilityCounts
from sidestep.catalog.layout import Layout
from sidestep.metrics.computed_gauges import scalar
from sidestep.metrics.engine import Engine, Number

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


def kv_capacity(engine: Engine) -> float | None:
    """Return the tokens that fit into the KV cache, by the engine's cache configuration."""
    config = engine.info.get("cache_config", {})
    try:
        # Not the product where layers differ in their cache; older releases have that alone.
        size = config.get("kv_cache_size_tokens")
        return int(size or 0) or int(config["num_gpu_blocks"]) * int(config["block_size"])
    except (KeyError, ValueError):
        return None


def _drafts(engine: Engine) -> tuple[Number, Number, Number]:
    prefix = "vllm:spec_decode_num_"
    return (
        scalar(engine, prefix + "drafts_total"),
        scalar(engine, prefix + "draft_tokens_total"),
        scalar(engine, prefix + "accepted_tokens_total"),
    )


def _acceptance_rate(engine: Engine) -> float | None:
    _, drafted, accepted = _drafts(engine)
    return accepted / drafted if drafted else None


def _efficiency(engine: Engine) -> float | None:
    drafts, drafted, accepted = _drafts(engine)
    return (accepted + drafts) / (drafted + drafts) if drafts else None


COMPUTED: Mapping[str, Callable[[Engine], float | None]] = {
    "draft_acceptance_rate": _acceptance_rate,
    "draft_efficiency": _efficiency,
}
"""Functions by the name in ``catalog.row.Computed``; None: no sample."""
