"""Where time went: in the last minute, and by limit over the intervals of ten minutes."""

from __future__ import annotations

import pytest

from exporters import Start
from pages import get, parse
from replays import replay
from sidestep.exposition.live.time_spent import (
    UNKNOWN_LIMIT,
    TimeHistory,
    TimeSpent,
    Totals,
    row_fields,
)
from sidestep.exposition.live.time_spent import totals as totals_of
from sidestep.protocol.request_events import LIMITS


def totals(at: float, caught_up_at: float = 0.0, **limits: float) -> Totals:
    """Return totals of an engine that has only limits."""
    return Totals(at, limits, {}, {}, caught_up_at)


def test_each_interval_has_the_limit_that_held_longest() -> None:
    """Before the first one, after a backlog and while the engine was idle, none is known."""
    history = TimeHistory(5)
    history.add(totals(0.0, none=1.0))
    history.add(totals(5.0, none=4.0, slots=2.0))
    history.add(totals(10.0, none=4.5, slots=6.5))
    history.add(totals(15.0, none=4.5, slots=6.5))
    history.add(totals(20.0, caught_up_at=18.0, none=99.0))

    none, slots = LIMITS.index("none"), LIMITS.index("slots")
    assert [*history.limits] == [UNKNOWN_LIMIT, none, slots, UNKNOWN_LIMIT, UNKNOWN_LIMIT]
    history.add(totals(25.0, caught_up_at=18.0, none=99.0, slots=1.0))
    assert [*history.limits] == [none, slots, UNKNOWN_LIMIT, UNKNOWN_LIMIT, slots]


@pytest.mark.parametrize(
    ("limits", "limit", "share"),
    [
        ({}, None, None),
        ({"none": 10.0}, "none", None),
        ({"none": 9.1, "tokens": 0.9}, "none", None),
        ({"none": 2.0, "tokens": 5.0, "slots": 3.0}, "tokens", 0.5),
    ],
)
def test_the_limit_of_a_row(
    limits: dict[str, float], limit: str | None, share: float | None
) -> None:
    """A limit that hardly held is none, and an engine without limits has an unknown one."""
    fields = row_fields(TimeSpent(limits))
    assert (fields["limit"], fields["limit_share"]) == (limit, share)


async def test_since_the_first_totals(start: Start) -> None:
    """An engine's parts are those of the metrics page, and Triton's own numbers follow from its counters."""
    async with start() as exporter:
        for name in ("core_aborts", "triton"):
            await replay(exporter, name, name)
        found = {}
        for name, engine in exporter.registry.engines.items():
            history = TimeHistory(3)
            first = totals_of(engine, 0.0)
            zeros = dict.fromkeys(first.counters, 0.0)
            history.add(first._replace(limits={}, parts={}, counters=zeros))
            found[name] = history.last_minute(engine, 10.0)
        page = parse(await get(exporter.url))

    samples = page["sidestep_request_part_seconds"].samples.items()
    parts = {dict(key)["part"]: value for (_, key), value in samples if value}
    core = found["core_aborts/vm/tiny/0"].parts
    assert core["decode"] == pytest.approx(parts["decode"])
    assert core["queue.unknown"] == pytest.approx(parts["queue"])

    model = (("model", "dynbatch"), ("version", "1"))
    succeeded, waited = (
        next(value for (_, key), value in page[name].samples.items() if {*key} >= {*model})
        for name in ("nv_inference_request_success", "nv_inference_queue_duration_us")
    )
    own = found["triton/dynbatch/1"].own
    assert own["requests_per_second"] == pytest.approx(succeeded / 10)
    assert own["failures_per_second"] == 0
    assert own["mean_queue_seconds"] == pytest.approx(waited / succeeded / 1e6)
    assert {name for name, each in found.items() if each.own} == {
        name for name in found if name.startswith("triton/")
    }
