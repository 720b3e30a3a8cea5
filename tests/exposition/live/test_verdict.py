"""The evaluation of engines: which need attention, and which one the verdict names and why."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.diagnosis.own_checks import PROBLEMS
from sidestep.exposition.live.answers import Attention, EngineRow, Percentiles, Verdict
from sidestep.exposition.live.verdict import ENOUGH, RANKS, evaluate, state_text
from sidestep.exposition.statistics_log import Line
from sidestep.ingest.health import ALARMING, NOT_READY
from sidestep.tracking.health.states import LEVELS, EngineState, Level
from sidestep_tools.top.columns import ATTENTION, Order, entries, matches, ordered
from sidestep_tools.top.report import TargetReport, report

SERVING = {"ok", "idle", "slow"}
STATES = [*(state.value for state in EngineState), None]
GAUGES: Sequence[dict[str, Any]] = (
    {},
    {"running": 0.0, "waiting": 0.0, "kv_cache_usage": 0.0, "saturation": 0.0},
    {"running": 19.0, "waiting": 7.0, "kv_cache_usage": 0.97},
    {"running": 19.0, "waiting": 7.0, "kv_cache_usage": 0.5, "saturation": 3.0},
)
AGES = (None, 0.0, 9.0, 31.0, 299.0)
"""Seconds since an engine's last item."""


def row(name: str = "a", **fields: Any) -> EngineRow:
    """Return an engine of one model."""
    return EngineRow(
        **{"id": f"id-{name}", "engine": name, "model": "m", "dialect": "vllm", **fields}
    )


def verdict(rows: Sequence[EngineRow]) -> Verdict:
    """Return the verdict on all engines."""
    return evaluate(rows).verdict


FACTS = [
    {
        "state": state,
        "up": up,
        "last_seen": age,
        **({"stalled_seconds": 30.0} if state in ("stalled", "slow") else {}),
        **gauges,
    }
    for state, up, age, gauges in itertools.product(STATES, (True, False), AGES, GAUGES)
]
"""Every state with every staleness and every load, also those that contradict each other."""


def is_serving(fields: dict[str, Any]) -> bool:
    """Return whether an engine of these facts serves requests."""
    return bool(fields["up"] if fields["state"] is None else fields["state"] in SERVING)


@given(st.lists(st.sampled_from(FACTS), min_size=1, max_size=6))
def test_nothing_is_well_that_is_not(facts: list[dict[str, Any]]) -> None:
    """Whatever engines are mixed: only those that serve are called well, and none else is full."""
    rows = [row(str(number), **fields) for number, fields in enumerate(facts)]
    found = evaluate(rows)

    troubled = [each for each in found.rows if each.attention]
    assert found.serves is any(
        is_serving(fields) or each.attention for fields, each in zip(facts, found.rows, strict=True)
    )
    for fields, each in zip(facts, found.rows, strict=True):
        assert (each.level in ("warning", "critical")) is (each.attention is not None)
        if not is_serving(fields):
            assert each.attention in (None, "stalled", "unreachable")
            assert each.level != "ok"
    if troubled:
        assert found.verdict.level != "ok"
        (more,) = re.findall(r"; (\d+) more need", found.verdict.text) or ["0"]
        assert int(more) == len(troubled) - 1
    elif any(map(is_serving, facts)):
        assert found.verdict.level == "ok"
        well = sum(map(is_serving, facts))
        claims = re.match(r"(?:all )?(\d+)(?: of \d+)? engine", found.verdict.text)
        assert claims is not None
        assert int(claims[1]) == well
        assert ("all" in found.verdict.text) is (well == len(rows) > 1)
    else:
        assert found.verdict.level is None
        assert re.match(
            "no engine serves requests: |[0-9]+ engines? ha(s|ve) stopped$", found.verdict.text
        )


@given(st.lists(st.sampled_from(FACTS), min_size=1, max_size=6))
def test_every_view_has_the_same_evaluation(facts: list[dict[str, Any]]) -> None:
    """``top`` marks, sorts first and finds what the verdict counts, and the statistics line says it."""
    rows = [row(str(number), **fields) for number, fields in enumerate(facts)]
    found = evaluate(rows)
    seen = report([TargetReport(url="http://a", engines=rows)], 0.0)

    assert seen.verdict == found.verdict
    assert seen.targets[0].engines == found.rows
    table = entries(seen)
    troubled = {each.id for each in found.rows if each.attention}
    assert {e.row.id for e in table if e.row and matches(e, ATTENTION)} == troubled
    first = ordered(table, Order("state"))[: len(troubled)]
    assert {e.row.id for e in first if e.row} == troubled
    for each in found.rows:
        text = Line(each, "a").text()
        assert text.endswith(f"state {state_text(each)}") is (
            each.attention is not None or (each.state is not None and each.level is None)
        )


def test_probes_and_findings_follow_the_same_levels() -> None:
    """Each kind of problem has a finding, and each state fails the probes that its level says."""
    assert PROBLEMS.keys() == set(get_args(Attention)) == set(RANKS)
    for state, level in LEVELS.items():
        assert (state in ALARMING) is (level == "critical")
        assert (state in NOT_READY) is (level in ("critical", None))


def test_a_target_that_does_not_answer_is_critical() -> None:
    """However well the engines of others are, and not as if no engine were connected."""
    gone = TargetReport(url="http://a", error="connection refused", engines=[row(state="ok")])
    other = TargetReport(url="http://b", engines=[row("b", state="ok")])

    assert report([gone], 0.0).verdict == Verdict(
        "critical", "http://a does not answer: connection refused"
    )
    both = report([gone, other], 0.0).verdict
    assert both.level == "critical"
    assert both.text.endswith("connection refused; 1 engine is well")


def latency(p95: float, count: float = ENOUGH) -> Percentiles:
    """Return percentiles of so many observations."""
    return Percentiles(p95 / 2, p95, p95 * 2, count)


@pytest.mark.parametrize(
    ("rows", "level", "text"),
    [
        ([], "warning", "no engine is connected"),
        ([{}], "ok", "1 engine is well"),
        (
            [{"running": 3, "waiting": 1, "state": "ok"}, {"running": 2}],
            "ok",
            "all 2 engines are well: requests running 5, waiting 1",
        ),
        (
            [{"state": "stopped"}] * 2,
            None,
            "2 engines have stopped",
        ),
        (
            [{"state": "starting"}, {"state": "asleep"}],
            None,
            "no engine serves requests: 1 asleep, 1 starting",
        ),
        (
            [{"state": "ok"}, {"state": "stopped"}, {"state": "idle"}],
            "ok",
            "2 of 3 engines are well, 1 stopped",
        ),
    ],
)
def test_engines_of_which_none_needs_attention(
    rows: list[dict[str, Any]], level: Level | None, text: str
) -> None:
    """Requests add up, states are counted, and a system without a serving engine is not well."""
    engines = [row(str(number), **fields) for number, fields in enumerate(rows)]
    assert verdict(engines) == Verdict(level, text)


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
        (
            {"running": 8, "waiting": 196, "saturation": 0.9, "limit": "slots", "limit_share": 0.6},
            "warning",
            "engine a is saturated: 196 requests wait, 8 run",
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
        {"running": 8, "waiting": 8, "limit": "slots", "limit_share": 0.9},
        {"running": 8, "waiting": 196, "limit": "slots", "limit_share": 0.4},
        {"running": 8, "waiting": 9, "limit": "kv_transfer", "limit_share": 0.9},
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
