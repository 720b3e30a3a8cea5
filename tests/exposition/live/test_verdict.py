"""The verdict: which engine it names, and why."""

from __future__ import annotations

from typing import Any

import pytest

from sidestep.exposition.live.rows import EngineRow, Percentiles, Verdict
from sidestep.exposition.live.verdict import ENOUGH, verdict


def row(name: str = "a", **fields: Any) -> EngineRow:
    """Return an engine of one model."""
    return EngineRow(
        **{"id": f"id-{name}", "engine": name, "model": "m", "dialect": "vllm", **fields}
    )


def latency(p95: float, count: float = ENOUGH) -> Percentiles:
    """Return percentiles of so many observations."""
    return Percentiles(p95 / 2, p95, p95 * 2, count)


def test_without_engines_there_is_nothing_to_judge() -> None:
    """That is no good state of a system that should have some."""
    assert verdict([]) == Verdict("warning", "no engine is connected")


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([row()], "1 engine is well: requests running 0, waiting 0"),
        (
            [row("a", running=3, waiting=1, state="ok"), row("b", running=2)],
            "all 2 engines are well: requests running 5, waiting 1",
        ),
        ([row(state="idle")], "1 engine is well: requests running 0, waiting 0"),
    ],
)
def test_engines_that_are_well(rows: list[EngineRow], text: str) -> None:
    """Their requests add up; no engine is named."""
    assert verdict(rows) == Verdict("ok", text)


@pytest.mark.parametrize(
    ("fields", "level", "text"),
    [
        (
            {"state": "stalled", "reason": "step", "stalled_seconds": 12.4},
            "critical",
            "engine a is stalled: no progress for 12 s (step)",
        ),
        ({"state": "stalled"}, "critical", "engine a is stalled: no progress for 0 s"),
        ({"state": "unreachable"}, "critical", "engine a is unreachable"),
        (
            {"state": "slow", "reason": "no_steps", "stalled_seconds": 4.0},
            "warning",
            "engine a is slow: no progress for 4 s (no_steps)",
        ),
        (
            {"waiting": 7, "kv_cache_usage": 0.97},
            "warning",
            "engine a is full: 7 requests wait, KV cache 97% in use",
        ),
        (
            {"waiting": 2, "saturation": 1.2, "kv_cache_usage": 0.5},
            "warning",
            "engine a is saturated: load 120% of its capacity, 2 requests wait",
        ),
        (
            {"saturation": 1.0},
            "warning",
            "engine a is saturated: load 100% of its capacity, 0 requests",
        ),
    ],
)
def test_an_engine_that_needs_attention(fields: dict[str, Any], level: str, text: str) -> None:
    """The verdict names it and says why."""
    found = verdict([row("b"), row("a", **fields)])

    assert (found.level, found.engine) == (level, "id-a")
    assert found.text.startswith(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"waiting": 0, "kv_cache_usage": 1.0},
        {"waiting": 5, "kv_cache_usage": 0.94},
        {"waiting": 5},
        {"saturation": 0.999},
    ],
)
def test_a_busy_engine_needs_no_attention(fields: dict[str, Any]) -> None:
    """A full cache without a queue is good use of memory, and a queue alone is load."""
    assert verdict([row(**fields)]).level == "ok"


def test_the_worst_engine_is_named() -> None:
    """By the kind of complaint, then by its degree; the others are counted."""
    stalled = row("c", state="stalled", stalled_seconds=30.0)
    rows = [
        row("a", state="slow", stalled_seconds=100.0),
        row("b", state="stalled", stalled_seconds=20.0),
        stalled,
        row("d", state="unreachable", last_seen=500.0),
        row("e", waiting=900, kv_cache_usage=1.0),
    ]

    assert verdict(rows).text == "engine c is stalled: no progress for 30 s; 4 more need attention"
    assert verdict([rows[0], stalled]).text.endswith("; 1 more needs attention")
    without = [each for each in rows if each.state != "stalled"]
    assert verdict(without).engine == "id-d"
    assert verdict([rows[4], row("f", waiting=3, saturation=2.0)]).engine == "id-e"


@pytest.mark.parametrize(("name", "title"), [("ttft", "TTFT"), ("inter_token", "ITL")])
def test_a_replica_that_stands_out(name: str, title: str) -> None:
    """Its p95 is three times the median of the others; an engine of another model is none."""
    others = [row(each, **{name: latency(0.125)}) for each in "bc"]
    slow = row("a", **{name: latency(0.375)})

    found = verdict([*others, slow])
    assert found == Verdict(
        "warning", f"engine a stands out: {title} p95 0.375 s, other replicas 0.125 s", "id-a"
    )
    for calm in (
        [*others, row("a", **{name: latency(0.37)})],
        [*others, row("a", **{name: latency(0.375, ENOUGH - 1)})],
        [*others, row("a", model="other", **{name: latency(0.375)})],
        [*others, row("a", dialect="sglang", **{name: latency(0.375)})],
        [others[0], slow],
        [*(row(each, **{name: latency(0.0)}) for each in "bc"), slow],
    ):
        assert verdict(calm).level == "ok"


def test_an_outlier_counts_least() -> None:
    """A full engine is worse, and one engine with two complaints counts once."""
    replicas = [row(each, ttft=latency(0.1), inter_token=latency(0.01)) for each in "bc"]
    both = row("a", ttft=latency(1.0), inter_token=latency(0.2))
    full = row("d", waiting=1, kv_cache_usage=1.0)

    assert verdict([*replicas, both]).text.startswith("engine a stands out: ITL p95")
    assert "more" not in verdict([*replicas, both]).text
    assert verdict([*replicas, both, full]).engine == "id-d"
