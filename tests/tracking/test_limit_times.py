"""The time that each limit held, compared with the definition, millisecond by millisecond."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.request_events import (
    LIMITS,
    Event,
    Finished,
    Iteration,
    Output,
    Queued,
    RequestEvents,
)
from sidestep.tracking.requests.inflight_state import capture_tracker, restore
from sidestep.tracking.requests.limits import MAX_BUSY, LimitTimes
from sidestep.tracking.requests.machine import RequestTracker
from sidestep.tracking.requests.outcomes import Outcomes

NONE, SLOTS, KV_BLOCKS, PAUSED = map(LIMITS.index, ("none", "slots", "kv_blocks", "paused"))
WALL = 1_700_000_000.0


def queued(number: int, at: float) -> Queued:
    """Return the event of a request that begins."""
    return Queued(number, at, WALL + at, 8)


def finished(number: int, at: float) -> Finished:
    """Return the event of a request that ends."""
    return Finished(number, at, WALL + at, 0)


def step(started: float, ended: float, limit: int | None, *numbers: int) -> Iteration:
    """Return a step in which each of ``numbers`` got a token."""
    outputs = [Output(ended, [*numbers])] if numbers else []
    return Iteration(started, ended, WALL + ended, outputs, limit=limit)


def item(events: Sequence[Event], at: float = 0.0, source: int = 1) -> RequestEvents:
    """Return an item of these events."""
    return RequestEvents(0, at, source, [*events])


def sums(outcomes: Iterable[Outcomes]) -> tuple[dict[str, float], dict[str, int]]:
    """Return seconds and steps by limit."""
    micros: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for each in outcomes:
        micros.update(each.limit_micros)
        steps.update(each.limit_steps)
    return {limit: count / 1e6 for limit, count in micros.items()}, dict(steps)


moves = st.lists(
    st.tuples(
        st.sampled_from(["ask", "end", "end", "step", "step", "step", "empty"]),
        st.integers(0, 30),
        st.none() | st.integers(0, len(LIMITS) + 1),
        st.integers(0, 20),
    ),
    max_size=40,
)


def stream(chosen: Iterable[tuple[str, int, int | None, int]]) -> list[Event]:
    """Return a legal stream: steps are scheduled in order, and may end after later events."""
    now, number = 1000, 0
    alive: list[int] = []
    late: list[tuple[int, Event]] = []
    events: list[tuple[int, Event]] = []
    for action, wait, limit, length in chosen:
        now += wait
        if action == "ask":
            number += 1
            alive.append(number)
            events.append((now, queued(number, now / 1e3)))
        elif action == "end" and alive:
            events.append((now, finished(alive.pop(wait % len(alive)), now / 1e3)))
        elif action in ("step", "empty"):
            numbers = alive[:2] if action == "step" else []
            # A request that ends while it is computed has no output.
            batch = step(now / 1e3, (now + length) / 1e3, limit)
            batch.scheduled = numbers or None
            ended = max([now + length, *(at for at, _ in late)])
            late.append((ended, batch))
            batch.stamp = ended / 1e3
    events += late
    # Events of equal times keep their order: a step that ends comes after what happened before.
    return [event for _, event in sorted(events, key=lambda pair: pair[0])]


def by_definition(events: Sequence[Event]) -> dict[str, float]:
    """Return the seconds by limit until the last step, millisecond by millisecond."""
    steps = [event for event in events if isinstance(event, Iteration) and event.limit is not None]
    if not steps:
        return {}
    counted: Counter[str] = Counter()
    for milli in range(round(steps[0].started * 1e3), round(steps[-1].started * 1e3)):
        now = milli / 1e3
        begun = sum(isinstance(e, Queued) and e.stamp <= now for e in events)
        ended = sum(isinstance(e, Finished) and e.stamp <= now for e in events)
        limit = [one.limit for one in steps if one.started <= now][-1]
        assert limit is not None
        if begun > ended:
            counted[LIMITS[limit] if limit < len(LIMITS) else "deferred"] += 1
    return {limit: count / 1e3 for limit, count in counted.items()}


FIRST_STEP = [
    ("ask", 0, 9, 0),
    ("end", 0, 5, 0),
    ("step", 0, 6, 1),
    ("ask", 1, 1, 0),
    ("empty", 1, 1, 0),
]
"""The engine's first step ends after another request has come."""


@example(chosen=FIRST_STEP, cuts=set())
@given(chosen=moves, cuts=st.sets(st.integers(0, 40), max_size=5))
def test_any_stream_equals_the_definition(
    chosen: list[tuple[str, int, int | None, int]], cuts: set[int]
) -> None:
    """However it is divided into items; the sums are exact."""
    events = stream(chosen)
    ends = [*sorted(cut for cut in cuts if cut < len(events)), len(events)]
    tracker = RequestTracker()

    found, steps = sums(
        tracker.apply(item(events[start:end])) for start, end in zip([0, *ends], ends, strict=False)
    )

    assert by_definition(events) == found
    assert sum(steps.values()) == sum(
        isinstance(event, Iteration) and event.limit is not None and bool(event.scheduled)
        for event in events
    )


@given(
    times=st.lists(st.tuples(st.floats(0, 1e15), st.floats(0, 1e15), st.integers(0, 99))),
    busy=st.lists(st.tuples(st.booleans(), st.floats(0, 1e15))),
)
def test_no_time_is_negative_or_unbounded(
    times: list[tuple[float, float, int]], busy: list[tuple[bool, float]]
) -> None:
    """Whatever a sender claims."""
    limits, out = LimitTimes(), RequestTracker().apply(item([]))
    for (started, ended, limit), (is_busy, at) in zip(times, busy, strict=False):
        limits.observe(step(started, ended, limit), out)
        limits.update(at, out, is_busy=is_busy)
        assert len(limits.busy) <= MAX_BUSY

    assert out.limit_micros.keys() <= {*LIMITS}
    assert all(0 < micros <= len(times) << 41 for micros in out.limit_micros.values())


def test_a_pause_is_counted_while_it_lasts() -> None:
    """No step ends it; a step that was scheduled before it does not end it either."""
    tracker = RequestTracker()
    events: list[Event] = [queued(1, 1.0), step(1.0, 1.5, NONE, 1), step(3.0, 3.0, PAUSED)]
    found, _ = sums([
        tracker.apply(item(events)),
        tracker.apply(item([], 10.0)),
        tracker.apply(item([step(2.9, 11.0, NONE, 1)])),
        tracker.apply(item([], 13.0)),
    ])  # fmt: skip
    resumed, _ = sums([tracker.apply(item([step(14.0, 14.0, NONE), step(14.5, 15.0, NONE, 1)]))])

    assert {"none": 2.0, "paused": 10.0} == found
    assert {"paused": 1.0, "none": 0.5} == resumed


def test_another_process_begins_anew() -> None:
    """The time between the last step of the one and the first of the other is unknown."""
    tracker = RequestTracker()
    first: list[Event] = [queued(1, 1.0), step(1.0, 2.0, SLOTS, 1), step(2.0, 3.0, SLOTS, 1)]
    second: list[Event] = [
        queued(1, 100.0),
        step(101.0, 102.0, NONE, 1),
        step(103.0, 104.0, NONE, 1),
    ]

    found, _ = sums([tracker.apply(item(first)), tracker.apply(item(second, source=2))])

    assert {"slots": 1.0, "none": 2.0} == found


@given(chosen=moves, cut=st.integers(0, 40))
def test_a_restart_of_the_exporter_loses_no_time(
    chosen: list[tuple[str, int, int | None, int]], cut: int
) -> None:
    """With a snapshot in between, the sums are those of one run."""
    events = stream(chosen)
    before, after = RequestTracker(), RequestTracker()
    first = before.apply(item(events[:cut]))
    for state in capture_tracker("e", before):
        restore(after, msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=type(state)))

    found, _ = sums([first, after.apply(item(events[cut:]))])

    assert by_definition(events) == found


def test_times_that_go_back_are_bounded() -> None:
    """Requests of a sender whose times overlap leave nothing behind, and count no time twice."""
    times, out = LimitTimes(), Outcomes(IterationStats())
    times.observe(step(1.0, 1.5, SLOTS), out)
    for number in range(1000):
        at = 2.0 + number / 1000
        times.update(at, out, is_busy=True)
        times.update(at + 0.02, out, is_busy=False)
        assert len(times.busy) <= MAX_BUSY
    times.observe(step(4.0, 4.5, SLOTS), out)
    assert out.limit_micros == {"slots": 1_019_000}
