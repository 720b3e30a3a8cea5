"""The answer of ``/api/v1/kv/curve``: the hit-ratio curve of each engine's prefix cache."""

from __future__ import annotations

import msgspec

from sidestep.metrics.engine import Engine
from sidestep.tracking.kv_blocks.lookups import LookupTracker

STEPS = (-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
"""Sizes of the curve, as logarithms to base 2 of the multiple of the present size."""


class CurvePoint(msgspec.Struct, frozen=True, gc=False):
    """The share of looked-up tokens that a cache of one size finds.

    Attributes:
        capacity: The size as a multiple of the present cache.
        blocks: The same in blocks.
        tokens: The same in tokens.
        bytes: The same in bytes on each of the engine's devices; None where that is unknown.
        low: Lower bound of the interval of the sampling error: in some nine of ten cases it holds what
            the same lookups give if all blocks are sampled. Errors of the model are not part of it.
        high: Upper bound of the interval.
    """

    capacity: float
    blocks: int
    tokens: int
    bytes: int | None
    hit_ratio: float
    low: float
    high: float


class EngineCurve(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The curve of one engine.

    Attributes:
        model: The model's name; empty if it has none.
        block_size: Tokens of a block.
        capacity_blocks: Blocks that the cache can hold; None where it is unknown.
        sample_ratio: Share of the blocks that is sampled.
        sampled_blocks: Sampled blocks that are tracked now.
        hit_ratio: Share of the tokens that were found in fact; None before the first lookup.
        working_set_blocks: Blocks that requests used within the last half-life.
        sufficient_blocks: The smallest cache whose hit ratio is within one point of the best.
        hit_ratio_per_gib: What one more GiB adds to the hit ratio.
        shared_hit_ratio: With one cache as large as those of all engines of the model together.
        curve: Empty where the size of the cache is unknown, and before the first lookup.
    """

    id: str
    engine: str
    model: str
    block_size: int
    capacity_blocks: int | None
    sample_ratio: float
    sampled_blocks: int
    hit_ratio: float | None
    working_set_blocks: float | None = None
    sufficient_blocks: float | None = None
    hit_ratio_per_gib: float | None = None
    shared_hit_ratio: float | None = None
    curve: list[CurvePoint]


def engine_curve(engine: Engine, name: str, tracker: LookupTracker) -> EngineCurve:
    """Return the curve of an engine, from its lookups."""
    summary, capacity, size = tracker.summary, tracker.capacity, tracker.block_size
    sizes = [max(round(capacity * 2.0**step), 1) for step in STEPS] if capacity else []
    points = tracker.reuse.points(sizes)
    return EngineCurve(
        id=engine.id,
        engine=name,
        model=engine.labels.get("model_name", ""),
        block_size=size,
        capacity_blocks=capacity or None,
        sample_ratio=tracker.reuse.rate,
        sampled_blocks=tracker.reuse.tracked,
        hit_ratio=tracker.reuse.curve.hit_ratio,
        working_set_blocks=None if summary is None else summary.working_set,
        sufficient_blocks=None if summary is None else summary.sufficient,
        hit_ratio_per_gib=None if summary is None else summary.per_gib,
        shared_hit_ratio=None if summary is None else summary.shared_hit_ratio,
        curve=[
            CurvePoint(
                point.blocks / capacity,
                point.blocks,
                point.blocks * size,
                point.blocks * tracker.block_bytes or None,
                point.hit_ratio,
                point.low,
                point.high,
            )
            for point in points
        ],
    )
