"""The verdict: one line that names the worst engine and why, for the live page and ``sidestep top``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from sidestep.exposition.live.rows import EngineRow, Level, Verdict

FULL = 0.95
"""Share of the KV cache from which on requests that wait, wait for blocks."""
OUTLIER = 3.0
"""A replica's p95 is remarkable from this multiple of the median of the other replicas on."""
ENOUGH = 20
"""Observations from which on a percentile is compared."""
LEAST_REPLICAS = 3
"""Replicas of a model from which on they are compared."""


class _Complaint(NamedTuple):
    """What is wrong with one engine; the highest rank, and in it the highest degree, is the worst."""

    rank: int
    degree: float
    level: Level
    row: EngineRow
    text: str


def verdict(rows: Sequence[EngineRow]) -> Verdict:
    """Return the verdict on all engines."""
    if not rows:
        return Verdict("warning", "no engine is connected")
    complaints = [found for row in rows if (found := _complaint(row)) is not None]
    complaints += _outliers(rows)
    complaints += [
        _Complaint(0, 0.0, "warning", row, "has the name of another living server: see SD136")
        for row in rows
        if row.contested
    ]
    if not complaints:
        return Verdict("ok", _calm(rows))
    worst = max(complaints, key=lambda each: (each.rank, each.degree))
    others = len({each.row.id for each in complaints}) - 1
    more = f"; {others} more need{'s' if others == 1 else ''} attention" if others else ""
    return Verdict(worst.level, f"engine {worst.row.engine} {worst.text}{more}", worst.row.id)


def _calm(rows: Sequence[EngineRow]) -> str:
    running = sum(row.running or 0 for row in rows)
    waiting = sum(row.waiting or 0 for row in rows)
    engines = "1 engine is" if len(rows) == 1 else f"all {len(rows)} engines are"
    return f"{engines} well: requests running {running:.0f}, waiting {waiting:.0f}"


def _complaint(row: EngineRow) -> _Complaint | None:
    """Return what is wrong with an engine by its own numbers."""
    seconds = row.stalled_seconds or 0.0
    why = f" ({row.reason})" if row.reason else ""
    if row.state == "stalled":
        text = f"is stalled: no progress for {seconds:.0f} s{why}"
        return _Complaint(5, seconds, "critical", row, text)
    if row.state == "unreachable":
        return _Complaint(4, row.last_seen or 0.0, "critical", row, "is unreachable")
    if row.state == "slow":
        text = f"is slow: no progress for {seconds:.0f} s{why}"
        return _Complaint(3, seconds, "warning", row, text)
    waiting, usage = row.waiting or 0.0, row.kv_cache_usage
    if waiting and usage is not None and usage >= FULL:
        text = f"is full: {waiting:.0f} requests wait, KV cache {usage:.0%} in use"
        return _Complaint(2, waiting, "warning", row, text)
    if row.saturation is not None and row.saturation >= 1.0:
        text = (
            f"is saturated: load {row.saturation:.0%} of its capacity, {waiting:.0f} requests wait"
        )
        return _Complaint(2, waiting, "warning", row, text)
    return None


def _outliers(rows: Sequence[EngineRow]) -> list[_Complaint]:
    """Return the replicas whose latency stands out among those of the same model."""
    found = []
    for name, title in (("ttft", "TTFT"), ("inter_token", "ITL")):
        replicas: dict[tuple[str, str], list[tuple[float, EngineRow]]] = {}
        for row in rows:
            percentiles = getattr(row, name)
            if percentiles is not None and percentiles.count >= ENOUGH:
                same = replicas.setdefault((row.dialect, row.model), [])
                same.append((percentiles.p95, row))
        for same in replicas.values():
            if len(same) < LEAST_REPLICAS:
                continue
            p95, row = max(same, key=lambda each: each[0])
            usual = median(other for other, its in same if its is not row)
            if usual > 0 and p95 >= OUTLIER * usual:
                text = f"stands out: {title} p95 {p95:.3g} s, other replicas {usual:.3g} s"
                found.append(_Complaint(1, p95 / usual, "warning", row, text))
    return found
