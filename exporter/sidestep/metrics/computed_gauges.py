"""Gauges that are computed from an engine's state at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sidestep.metrics.engine import Engine, Number


def scalar(engine: Engine, name: str) -> Number:
    """Return the sum over the children of the scalar row ``name``; 0 where there is no sample."""
    assignment = engine.layout.find(name)
    return sum(engine.values[slot] or 0 for slot in assignment.slots)


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


def _sample_ratio(engine: Engine) -> float | None:
    own = engine.own_sample_rate
    if own is not None or engine.blocks is None:
        return own
    return engine.blocks.block_ratio


COMPUTED_GAUGES: Mapping[str, Callable[[Engine], float | None]] = {
    "prefix_cache_hit_rate": lambda engine: engine.prefix_hits.rate,
    "prompt_throughput": lambda engine: engine.throughput and engine.throughput[0],
    "generation_throughput": lambda engine: engine.throughput and engine.throughput[1],
    "draft_acceptance_rate": _acceptance_rate,
    "draft_efficiency": _efficiency,
    "kv_sample_ratio": _sample_ratio,
    "kv_cached_sample_ratio": lambda engine: engine.blocks.cached_ratio if engine.blocks else None,
    "saturation": lambda engine: engine.saturation.ratio if engine.saturation else None,
    "kv_tracked_blocks": lambda engine: engine.blocks.tracked if engine.blocks else None,
}
"""Functions by the name in ``catalog.model.Computed``; None: no sample."""


def computed_gauge(engine: Engine, name: str) -> float | None:
    """Return the gauge ``name`` of ``engine``; a federated engine's exporter has computed it."""
    return engine.computed.get(name) if engine.federated else COMPUTED_GAUGES[name](engine)
