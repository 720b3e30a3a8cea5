"""The evaluation of engines: which need attention and why, and a line that names the worst.

The live page, ``sidestep top``, ``sidestep doctor`` and the statistics line show its results; none of
them decides on its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from sidestep.exposition.live.answers import Attention, EngineRow, Verdict
from sidestep.tracking.health.states import LEVELS, EngineState, Level

FULL = 0.95
"""At this share of the KV cache in use, waiting requests are taken to wait for blocks."""
BEHIND = 0.5
"""Requests that wait for a place in this share of the busy time, more than run, are too many."""
PLACES = ("slots", "tokens", "kv_blocks", "lora")
"""Limits of a batch's places; a grammar or a transfer is a wait of the request's own."""
OUTLIER = 3.0
"""A replica's p95 stands out if it is at least this multiple of the median of the other replicas."""
ENOUGH = 20
"""Percentiles of fewer observations are not compared."""
LEAST_REPLICAS = 3
"""Replicas are not compared if their model has fewer."""
RANKS: Sequence[Attention] = (
    "contested",
    "outlier",
    "saturated",
    "full",
    "slow",
    "unreachable",
    "stalled",
)
"""Reasons to look at an engine, the worst last."""
CAUSES: Mapping[Attention, str] = {"full": "kv_blocks", "slow": "stalled", "stalled": "stalled"}
"""Causes in ``catalog/tuning.py`` of problems that have only one."""
_LEVELS: dict[str | None, Level | None] = {state.value: level for state, level in LEVELS.items()}


class Evaluation(NamedTuple):
    """All engines, each with its level and its problem, and the verdict on them."""

    rows: list[EngineRow]
    verdict: Verdict

    @property
    def serves(self) -> bool:
        """True if an engine serves requests, or no engine is known."""
        return not self.rows or any(row.level is not None for row in self.rows)


class _Problem(NamedTuple):
    """Why an engine needs attention; of equal kinds, the highest degree is the worst."""

    kind: Attention
    degree: float
    row: EngineRow
    text: str

    @property
    def rank(self) -> tuple[int, float]:
        # A full engine is no worse than a saturated one.
        kind = "full" if self.kind == "saturated" else self.kind
        return RANKS.index(kind), self.degree

    def marked(self) -> EngineRow:
        level = _LEVELS.get(self.kind, "warning")
        cause = CAUSES.get(self.kind, self.row.limit if self.row.limit_share else None)
        return msgspec.structs.replace(
            self.row, level=level, attention=self.kind, problem=self.text, cause=cause
        )


def evaluate(rows: Iterable[EngineRow]) -> Evaluation:
    """Return the engines with their levels and problems, and the verdict."""
    found = [msgspec.structs.replace(row, level=_level(row)) for row in rows]
    problems = [each for row in found if (each := _problem(row)) is not None]
    problems += _outliers(found)
    problems += [
        _Problem("contested", 0.0, row, "has the identity of another living server")
        for row in found
        if row.contested
    ]
    worst: dict[str, _Problem] = {}
    for each in sorted(problems, key=lambda each: each.rank):
        worst[each.row.id] = each
    found = [worst[row.id].marked() if row.id in worst else row for row in found]
    return Evaluation(found, _verdict(found, max(problems, key=lambda p: p.rank, default=None)))


def state_text(row: EngineRow) -> str:
    """Return an engine's state, with the reason or the problem that it has besides: ``ok (full)``."""
    state = row.state or "not known"
    if row.stalled_seconds is not None:
        found = (row.reason, f"{row.stalled_seconds:.0f} s")
        return f"{state} ({', '.join(filter(None, found))})"
    return state if row.attention in (None, row.state) else f"{state} ({row.attention})"


def _level(row: EngineRow) -> Level | None:
    """Return the level of an engine without problems; None: it serves no requests."""
    if row.state is None:
        return "ok" if row.up else None
    return _LEVELS.get(row.state)


def _verdict(rows: Sequence[EngineRow], worst: _Problem | None) -> Verdict:
    if worst is not None:
        row = worst.marked()
        others = sum(each.attention is not None for each in rows) - 1
        more = f"; {others} more need{'s' if others == 1 else ''} attention" if others else ""
        return Verdict(row.level or "warning", f"engine {row.engine} {worst.text}{more}", row.id)
    if not rows:
        return Verdict("warning", "no engine is connected")
    serving = [row for row in rows if row.level is not None]
    idle = Counter(row.state or "not connected" for row in rows if row.level is None)
    rest = ", ".join(f"{count} {state}" for state, count in sorted(idle.items()))
    if not serving:
        stopped = f"{len(rows)} engine{'s have' if len(rows) > 1 else ' has'} stopped"
        is_stopped = idle.keys() == {EngineState.STOPPED.value}
        return Verdict(None, stopped if is_stopped else f"no engine serves requests: {rest}")
    well = f"{_well(len(serving), len(rows))}{rest and f', {rest}'}"
    requests = _requests([row for row in serving if row.summed])
    return Verdict("ok", f"{well}: requests {requests}" if requests else well)


def _requests(rows: Sequence[EngineRow]) -> str:
    """Return the sums of running and waiting requests, as far as an engine reports them."""
    sums = []
    for name in ("running", "waiting"):
        known = [number for row in rows if (number := getattr(row, name)) is not None]
        if known:
            sums.append(f"{name} {sum(known):.0f}")
    return ", ".join(sums)


def _well(serving: int, engines: int) -> str:
    if serving < engines:
        return f"{serving} of {engines} engines {'is' if serving == 1 else 'are'} well"
    return "1 engine is well" if engines == 1 else f"all {engines} engines are well"


def _problem(row: EngineRow) -> _Problem | None:
    """Return what is wrong with an engine by its own numbers."""
    if row.level == "ok":
        return _overload(row)
    seconds = row.stalled_seconds or 0.0
    progress = f"no progress for {seconds:.0f} s{f' ({row.reason})' if row.reason else ''}"
    match row.state:
        case EngineState.STALLED.value:
            return _Problem("stalled", seconds, row, f"is stalled: {progress}")
        case EngineState.UNREACHABLE.value:
            return _Problem("unreachable", row.last_seen or 0.0, row, "is unreachable")
        case EngineState.SLOW.value:
            return _Problem("slow", seconds, row, f"is slow: {progress}")
    # An engine that serves nothing has no current gauges.
    return None


def _overload(row: EngineRow) -> _Problem | None:
    """Return the problem of an engine that makes progress, but has more work than it can do."""
    waiting, usage, load = row.waiting or 0.0, row.kv_cache_usage, row.saturation
    if waiting and usage is not None and usage >= FULL:
        text = f"is full: {waiting:.0f} requests wait, KV cache {usage:.0%} in use"
        return _Problem("full", waiting, row, text)
    if load is not None and load >= 1.0:
        text = f"is saturated: load {load:.0%} of its capacity, {waiting:.0f} requests wait"
        return _Problem("saturated", waiting, row, text)
    running, share = row.running or 0.0, row.limit_share or 0.0
    if waiting > running and share >= BEHIND and row.limit in PLACES:
        # The load may be over: the engine still has to serve what has come.
        text = f"is saturated: {waiting:.0f} requests wait, {running:.0f} run"
        return _Problem("saturated", waiting, row, text)
    return None


def _outliers(rows: Sequence[EngineRow]) -> list[_Problem]:
    """Return the replicas whose latency stands out among those of the same model."""
    found = []
    for name, title in (("ttft", "TTFT"), ("inter_token", "ITL")):
        replicas: dict[tuple[str, str], list[tuple[float, EngineRow]]] = {}
        for row in rows:
            percentiles = getattr(row, name)
            if row.level and percentiles is not None and percentiles.count >= ENOUGH:
                same = replicas.setdefault((row.dialect, row.model), [])
                same.append((percentiles.p95, row))
        for same in replicas.values():
            if len(same) < LEAST_REPLICAS:
                continue
            p95, row = max(same, key=lambda each: each[0])
            usual = median(other for other, its in same if its is not row)
            if usual > 0 and p95 >= OUTLIER * usual:
                text = f"stands out: {title} p95 {p95:.3g} s, other replicas {usual:.3g} s"
                found.append(_Problem("outlier", p95 / usual, row, text))
    return found
