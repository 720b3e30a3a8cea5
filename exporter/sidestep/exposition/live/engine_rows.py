"""The engines that the live page and the statistics log show, which add up, and their rows."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from sidestep.exposition.aggregated_series import replica_of
from sidestep.exposition.live.answers import EngineRow
from sidestep.exposition.live.history import Merged, counted, hit_rate, known, percentiles
from sidestep.exposition.live.samples import (
    LATENCIES,
    EngineSample,
    Increase,
    Readers,
    can_have,
    is_shown,
)
from sidestep.exposition.live.time_spent import NOTHING_KNOWN, TimeSpent, merged, row_fields
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.tracking.health.states import Health


def engine_row(
    engine: Engine,
    name: str,
    sample: EngineSample,
    found: Increase | None,
    health: Health | None,
    *,
    wall: float,
    spent: TimeSpent = NOTHING_KNOWN,
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
        role=engine.role,
        running=running,
        waiting=waiting,
        kv_cache_usage=usage,
        saturation=saturation,
        up=engine.is_up,
        last_seen=max(wall - engine.last_seen, 0.0) if engine.last_seen else None,
        contested=engine.feeds.contested and engine.is_up,
        **_health(health),
        **counted_fields(found),
        **row_fields(spent),
    )


def counted_fields(found: Increase | None) -> dict[str, Any]:
    """Return the fields of a row that follow from what was counted; none if that is not known."""
    if found is None:
        return {}
    return {**counted(found), **_latencies(found)}


def _latencies(found: Increase) -> dict[str, Any]:
    return dict(zip(LATENCIES, map(percentiles, found.bounds, found.counts), strict=False))


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
        summed: Those that add up.
        merged: What the engines of these have counted in the last minute.
        spent: Where their time went.
    """

    def __init__(self) -> None:
        self.rows: list[EngineRow] = []
        self.summed: list[EngineRow] = []
        self.merged = Merged()
        self.spent: list[TimeSpent] = []

    def add(
        self,
        row: EngineRow,
        found: Increase | None,
        spent: TimeSpent = NOTHING_KNOWN,
        *,
        is_summed: bool,
    ) -> None:
        """Add the row of an engine, what it has counted, and where its time went."""
        self.rows.append(row if is_summed else msgspec.structs.replace(row, summed=False))
        if is_summed:
            self.summed.append(row)
            self.spent.append(spent)
            if found is not None:
                self.merged.add(found)

    def total(self) -> EngineRow | None:
        """Return all engines as one row; None without engines."""
        if not self.rows:
            return None
        total = _total(self.summed, self.merged.total(), len(self.rows))
        return msgspec.structs.replace(total, **row_fields(merged(self.spent)))


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
        **_latencies(merged),
    )


def has_requests(engine: Engine) -> bool:
    """Return whether the engine can have running requests."""
    running = Readers.of(engine.layout).running
    return running is not None and can_have(engine, running)


def key_number(engine: Engine, name: str) -> float | None:
    """Return the engine's number ``name`` of ``KeySeries``; None if its dialect names no such series."""
    read = Readers.of(engine.layout).key.get(name)
    return None if read is None else read(engine) or 0


def without_repeated_ranks(engines: Sequence[Engine]) -> list[Engine]:
    """Return ``engines`` without ranks that repeat what a lower rank of their replica reports."""
    mirrored = {
        engine
        for engine in engines
        if (running := Readers.of(engine.layout).running) is not None and running.mirrored
    }
    ranks = [(replica_of(engine.labels), engine) for engine in engines if engine in mirrored]
    ranks.sort(key=lambda each: each[0][1])
    lowest = {replica: engine for (replica, _), engine in reversed(ranks)}
    repeated = mirrored - {*lowest.values()}
    return [engine for engine in engines if engine not in repeated]


class ShownEngines:
    """The shown engines of a registry, which are found again only after an engine has changed its labels.

    Attributes:
        engines: Engines of which there is something to show.
        hidden: The others, such as an HTTP server's.
        summed: Shown ones that count in the row of all engines.
    """

    def __init__(self, registry: Registry) -> None:
        self.engines: Sequence[Engine] = ()
        self.hidden: Sequence[Engine] = ()
        self.summed: AbstractSet[Engine] = frozenset()
        self._registry = registry
        self._versions: Sequence[int] = ()

    def refresh(self) -> None:
        """Find the engines of this moment."""
        engines = [*self._registry.engines.values()]
        versions = [engine.label_version for engine in engines]
        if versions != self._versions:
            self._versions = versions
            self.engines = [engine for engine in engines if is_shown(engine)]
            shown = {*self.engines}
            self.hidden = [engine for engine in engines if engine not in shown]
            self.summed = _summed(self.engines)


def _summed(engines: Sequence[Engine]) -> AbstractSet[Engine]:
    """Return the engines that add up.

    Ranks that repeat others do not add up. If other engines push, nor do engines of a dialect with
    metric names of its own, such as native streams: the engine behind them usually pushes, too.
    """
    pushed = [engine for engine in engines if not engine.layout.tables.has_own_namespace] or engines
    ranks = without_repeated_ranks([engine for engine in pushed if has_requests(engine)])
    return {*ranks, *(engine for engine in pushed if not has_requests(engine))}
