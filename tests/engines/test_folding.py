"""Items that do not fit into a full ring count as if they had arrived."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intakes import CORE_RUNS, Fed, Step, lines, steps
from sidestep.engines.folding import ENVELOPE, ItemFolder
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import VllmSleep, VllmStep
from sidestep.metrics.engine_state import SeriesSettings
from sidestep.metrics.histogram import Histogram, rebucket
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import MAX_FRAME_BYTES
from sidestep.protocol.messages import EngineInfo, Settings
from sidestep.protocol.request_events import (
    LIMITS,
    Alive,
    Finished,
    Iteration,
    Output,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.protocol.self_described import Family, Sample, Samples

ENGINE = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"}, features=["engine_core"])
INTERVALS = (
    "vllm:kv_block",
    "vllm:time_to_first_token",
    "vllm:e2e_request_latency",
    "vllm:inter_token_latency",
    "vllm:request_",
    "sidestep_",
)
"""Families of requests and blocks that were in flight: folding loses these, and counts them."""


def fold(fed: Fed, some: list[Step], rate: float | None = None) -> None:
    """Fold a part of a recording, each stream by itself, and send the results."""
    folded: dict[str, list[bytes]] = {}
    for stream, engines, item in some:
        if item is None:
            fed.send_hello(stream, engines)
        else:
            folded.setdefault(stream, []).append(item)
    for stream, items in folded.items():
        fed.fold(stream, items, rate)


@pytest.mark.parametrize("run", CORE_RUNS)
def test_a_folded_part_of_a_run_counts(run: str) -> None:
    """Every counter, gauge and bucket is equal, except for requests in flight."""
    recorded = list(steps(run))
    third = len(recorded) // 3
    whole, folded = Fed(), Fed()
    whole.feed(recorded)
    folded.feed(recorded[:third])
    fold(folded, recorded[third : 2 * third])
    folded.feed(recorded[2 * third :])

    assert folded.rejected == {}
    assert lines(whole.page, *INTERVALS) == lines(folded.page, *INTERVALS)
    assert "vllm:generation_tokens_total" in whole.page


def events(*found: object, stamp: float = 0.0) -> bytes:
    """Return an encoded item of request events."""
    return encode_item(RequestEvents(0, stamp, 7, list(found)))  # type: ignore[arg-type]


def test_requests_cut_off_by_folding_are_counted_once() -> None:
    """A request counts once, whichever end of the folded part cuts it off."""
    fed = Fed()
    fed.send_hello("s", [ENGINE])
    fed.items("s", [events(*(Queued(n, 1.0) for n in (1, 2, 3)))])
    folded = (
        events(*(Queued(n, 2.0) for n in (4, 5))),
        events(*(Scheduled(n, 2.5) for n in (1, 4, 5))),
        events(Iteration(2.5, 3.0, 3.0, [Output(3.0, [1, 4, 5])])),
        events(Finished(1, 4.0, 4.0, 0, 1, 1), Finished(4, 4.0, 4.0, 0, 1, 1)),
    )
    fed.fold("s", folded)
    # 2, 3 and 5 are in the scheduler; 2 is in an event before the sender lists the requests in flight.
    fed.items("s", [events(Finished(2, 5.0, 5.0, 0, 1, 1))])
    fed.items("s", [events(*(Alive(n, 5.0, 0) for n in (3, 5)))])
    fed.items("s", [events(*(Finished(n, 6.0, 6.0, 0, 1, 1) for n in (3, 5)))])

    (engine,) = fed.intake.registry.engines.values()
    untracked = engine.layout.find("sidestep_untracked_requests_total")
    values = [engine.values[slot] or 0 for slot in untracked.slots]
    found = dict(zip((*untracked.row.closed, "other"), values, strict=True))
    success = engine.layout.find("vllm:request_success_total")

    # 1, 2, 3 at the begin, 5 at the end; 4 was reported from its start to its end.
    assert {name: n for name, n in found.items() if n} == {"folded": 4}
    assert sum(engine.values[slot] or 0 for slot in success.slots) == 5
    tracker = engine.part(Trackers).requests
    assert tracker is not None
    assert tracker.requests.live == {}


def test_time_by_limit_that_is_folded_counts() -> None:
    """Lost is only the time from the steps at both ends of the folded part to the next ones."""
    slots, blocks = LIMITS.index("slots"), LIMITS.index("kv_blocks")

    def step(second: int, limit: int) -> bytes:
        output = [Output(second + 0.5, [1])]
        return events(Iteration(second, second + 0.5, second + 0.5, output, limit=limit))

    fed = Fed()
    fed.send_hello("s", [ENGINE])
    fed.items("s", [events(Queued(1, 1.0)), *(step(second, slots) for second in range(2, 6))])
    fed.fold("s", [step(second, blocks) for second in range(6, 12)])
    fed.items("s", [events(Alive(1, 12.0, 2)), *(step(second, slots) for second in range(12, 15))])

    def found(name: str) -> dict[str, float]:
        values = {
            line.partition('limit="')[2].partition('"')[0]: float(line.rpartition(" ")[2])
            for line in lines(fed.page)
            if line.startswith(name)
        }
        return {limit: value for limit, value in values.items() if value}

    # The folded part knows its request from its first output on.
    assert {"slots": 3.0 + 2.0, "kv_blocks": 4.5} == found("sidestep_step_limit_seconds_total")
    assert {"slots": 7.0, "kv_blocks": 6.0} == found("sidestep_steps_total")


def test_a_folder_uses_the_exporters_bounds() -> None:
    """The exporter then has no counts to move."""
    folder = ItemFolder()
    folder.settings = Settings({"inter_token_latency": [0.5, 1.0]})
    item = IterationStats(1, inter_token_latencies_iter=[0.1, 0.7, 3.0])
    folder.fold(encode_item(VllmStep(0, 1.0, 1.0, None, item)), [ENGINE])
    folded = folder.seal()
    for overrides, moved in (({"inter_token_latency": (0.5, 1.0)}, 0), ({}, 3)):
        fed = Fed()
        fed.intake.registry.series = SeriesSettings(overrides)
        fed.send_hello("s", [ENGINE])
        fed.aggregate("s", folded.items, folded.frames)
        counters = fed.intake.metrics.counters()
        found = {n: v for n, _, v in counters if n == "sidestep_rebucketed_observations_total"}

        assert sum(found.values()) == moved
        assert 'vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 3' in fed.page


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=6, unique=True).map(sorted),
    st.lists(st.floats(0, 100), min_size=1, max_size=6, unique=True).map(sorted),
    st.lists(st.floats(0, 120), max_size=50),
)
def test_moved_counts_never_land_below_their_value(
    bounds: list[float], wanted: list[float], values: list[float]
) -> None:
    """No observation is lost."""
    histogram = Histogram(tuple(bounds))
    histogram.observe_many(list(values))
    moved = rebucket(tuple(bounds), histogram.counts, tuple(wanted))

    assert sum(moved) == len(values)
    for index, bound in enumerate(wanted):
        assert sum(moved[: index + 1]) <= sum(value <= bound for value in values)


def test_a_record_too_large_for_a_frame_is_split() -> None:
    """Each self-described family then has its own frame."""
    folder = ItemFolder()
    bounds = [float(n) for n in range(250)]
    pushed: Counter[str] = Counter()
    for number in range(10):
        name = f"own_{number}"
        children = [Sample([str(n)], 0.0, [], [1 << 35] * 251, 1.0) for n in range(60)]
        family = Family(name, "histogram", ["k"], children, "Own.", bounds)
        assert folder.fold(encode_item(Samples(0, 1.0, [family])), [ENGINE])
        pushed[name] += 60 * 251 * (1 << 35)
    folded = folder.seal()
    fed = Fed()
    fed.send_hello("s", [ENGINE])
    for records in folded.frames:
        fed.aggregate("s", 1, [records])
    (engine,) = fed.intake.registry.engines.values()

    assert len(folded.frames) > 1
    for frame in folded.frames:
        assert sum(map(len, frame)) <= MAX_FRAME_BYTES - ENVELOPE
    assert fed.rejected == {}
    for name, count in pushed.items():
        shown = engine.open_families[name].children.values()
        assert sum(sum(c.counts) for c in shown if isinstance(c, Histogram)) == count


def test_an_item_that_cannot_be_folded_is_reported() -> None:
    """An item that cannot be folded is reported and uses up its sequence number, as in the exporter."""
    folder = ItemFolder()

    assert not folder.fold(b"\xc0", [ENGINE])
    assert not folder.fold(encode_item(VllmSleep(3, 1.0)), [ENGINE])
    assert folder.seal().items == 2
    assert folder.count == 0
