"""The rows of the live answer: one for each engine, and one for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sidestep.exposition.live.answers import EngineRow
from sidestep.exposition.live.charts import counted, hit_rate, known, percentiles
from sidestep.exposition.live.history import Merged
from sidestep.exposition.live.samples import LATENCIES, EngineSample, Increase
from sidestep.metrics.engine import Engine
from sidestep.tracking.health.states import Health


def engine_row(
    engine: Engine,
    name: str,
    sample: EngineSample,
    found: Increase | None,
    health: Health | None,
    *,
    wall: float,
) -> EngineRow:
    """Return the row of an engine at Unix time ``wall``.

    What it has counted in the last minute and its health can be unknown.
    """
    running, waiting, usage, saturation = map(known, sample.gauges)
    return EngineRow(
        id=engine.id,
        engine=name,
        model=engine.labels.get("model_name") or engine.labels.get("model", ""),
        dialect=engine.layout.dialect,
        running=running,
        waiting=waiting,
        kv_cache_usage=usage,
        saturation=saturation,
        up=engine.is_up,
        last_seen=max(wall - engine.last_seen, 0.0) if engine.last_seen else None,
        contested=engine.contested and engine.is_up,
        **_health(health),
        **counted_fields(found),
    )


def counted_fields(found: Increase | None) -> dict[str, Any]:
    """Return the fields of a row that follow from what was counted; none if that is not known."""
    if found is None:
        return {}
    latencies = map(percentiles, found.bounds, found.counts)
    return {**counted(found), **dict(zip(LATENCIES, latencies, strict=False))}


def _health(health: Health | None) -> dict[str, Any]:
    if health is None:
        return {}
    return {
        "state": health.state.value,
        "reason": None if health.reason is None else health.reason.value,
        "stalled_seconds": health.age or None,
        "step_age": health.step_age,
    }


class Rows:
    """The rows of engines, as they are read one after the other.

    Attributes:
        rows: Those of all engines.
        summed: Those that add up.
        merged: What the engines of these have counted in the last minute.
    """

    def __init__(self) -> None:
        self.rows: list[EngineRow] = []
        self.summed: list[EngineRow] = []
        self.merged = Merged()

    def add(self, row: EngineRow, found: Increase | None, *, is_summed: bool) -> None:
        """Add the row of an engine, and what it has counted."""
        self.rows.append(row)
        if is_summed:
            self.summed.append(row)
            if found is not None:
                self.merged.add(found)

    def total(self) -> EngineRow | None:
        """Return all engines as one row; None without engines."""
        return _total(self.summed, self.merged.total(), len(self.rows)) if self.rows else None


def _total(parts: Sequence[EngineRow], merged: Increase, engines: int) -> EngineRow:
    """Return the sum of ``parts``, which have counted ``merged``, as one row of so many engines."""

    def numbers(name: str) -> list[float]:
        return [found for row in parts if (found := getattr(row, name)) is not None]

    def total(name: str) -> float | None:
        found = numbers(name)
        return sum(found) if found else None

    usages = numbers("kv_cache_usage")
    models, dialects = {row.model for row in parts}, {row.dialect for row in parts}
    summed: dict[str, Any] = {
        name: total(name)
        for name in (
            "running",
            "waiting",
            "prompt_tokens_per_second",
            "generation_tokens_per_second",
            "finished",
            "aborted",
            "preemptions",
        )
    }
    latencies: dict[str, Any] = dict(
        zip(LATENCIES, map(percentiles, merged.bounds, merged.counts), strict=False)
    )
    return EngineRow(
        id="",
        engine=f"{engines} engine{'' if engines == 1 else 's'}",
        model=models.pop() if len(models) == 1 else "",
        dialect=dialects.pop() if len(dialects) == 1 else "",
        kv_cache_usage=sum(usages) / len(usages) if usages else None,
        prefix_hit_rate=hit_rate(merged),
        saturation=max(numbers("saturation"), default=None),
        step_age=max(numbers("step_age"), default=None),
        last_seen=min(numbers("last_seen"), default=None),
        **summed,
        **latencies,
    )
