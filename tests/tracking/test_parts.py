"""Parts of requests' latencies, compared with a simulated engine whose times are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intakes import CORE_RUNS, steps
from part_streams import BEFORE_OUTPUT, Simulation, Turn, turns
from records_of import Kept
from schedulers import WALL
from sidestep.engines.dialects import DIALECTS
from sidestep.metrics.registry import Registry, Tracking
from sidestep.protocol.request_events import (
    LIMITS,
    RUNNING,
    Alive,
    Event,
    Finished,
    Identity,
    Iteration,
    Output,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.tracking.requests import inflight_state
from sidestep.tracking.requests.engine_times import EngineTimes
from sidestep.tracking.requests.inflight_state import RequestsState, TrackerState
from sidestep.tracking.requests.machine import RequestTracker
from sidestep.tracking.requests.outcomes import EndedRequest
from sidestep.tracking.requests.parts import KEYS

EXACT = 1e-6
KV_BLOCKS, SLOTS, NONE = LIMITS.index("kv_blocks"), LIMITS.index("slots"), LIMITS.index("none")
encode = msgspec.msgpack.encode
decoder = msgspec.msgpack.Decoder(TrackerState | RequestsState)


class Sink:
    """Keeps ended requests."""

    needs_gaps = True

    def __init__(self) -> None:
        self.ended: dict[int, EndedRequest] = {}

    def tenant(self, identity: Identity | None, adapter: str) -> str:
        """Return no tenant."""
        del identity, adapter
        return ""

    def end(self, ended: EndedRequest) -> None:
        """Keep a request; none ends twice."""
        assert ended.number not in self.ended
        self.ended[ended.number] = ended

    def lose(self, count: int) -> None:
        """Fail, since no request is lost."""
        raise AssertionError(count)


def restarted(tracker: RequestTracker, sink: Sink) -> RequestTracker:
    """Return the tracker that an exporter's successor has."""
    after = RequestTracker(sink=sink)
    for piece in inflight_state.capture_tracker("e", tracker):
        inflight_state.restore(after, decoder.decode(encode(piece)))
    inflight_state.sort_preempted(after)
    after.reports.expected = tracker.reports.expected
    return after


def play(items: Iterable[RequestEvents], restarts: Iterable[int] = ()) -> dict[int, EndedRequest]:
    """Return the ended requests; the exporter restarts before these items."""
    sink = Sink()
    tracker = RequestTracker(sink=sink)
    for at, item in enumerate(items):
        if at in restarts:
            tracker = restarted(tracker, sink)
        tracker.apply(item)
    return sink.ended


def divided(events: Sequence[Event], cuts: Iterable[int] = ()) -> list[RequestEvents]:
    """Return the events as items that end at ``cuts``."""
    edges = [0, *sorted({cut for cut in cuts if cut < len(events)}), len(events)]
    return [RequestEvents(0, 0.0, 1, list(events[a:b])) for a, b in pairwise(edges)]


def parts_of(events: Sequence[Event], number: int = 1) -> Mapping[str, float]:
    """Return the parts of a request, rounded to microseconds."""
    parts = play(divided(events))[number].parts
    assert parts is not None
    return {key: round(seconds, 6) for key, seconds in parts.items() if seconds > EXACT}


def step(started: float, stamp: float, batch: Sequence[int], limit: int | None = 0) -> Iteration:
    """Return a step in which all requests of the batch get a token."""
    output = [Output(stamp, list(batch))] if batch else []
    return Iteration(started, stamp, WALL + stamp, output, limit=limit)


def end(number: int, stamp: float) -> Finished:
    """Return the end of a request."""
    return Finished(number, stamp, WALL + stamp, 1)


cuts = st.lists(st.integers(0, 150), max_size=6)


@given(turns, st.booleans(), st.booleans(), cuts, st.lists(st.integers(1, 6), max_size=4))
def test_parts_are_those_of_the_simulation(
    chosen: list[Turn], is_pipelined: bool, has_limits: bool, at: list[int], restarts: list[int]
) -> None:
    """They sum to the latency, however the stream is divided and wherever the exporter restarts."""
    simulation = Simulation(is_pipelined=is_pipelined, has_limits=has_limits)
    events = simulation.run(chosen)

    ended = play(divided(events))

    assert len(simulation.requests) == len(ended)
    for request in simulation.requests:
        parts = ended[request.number].parts
        assert parts is not None
        assert sum(parts.values()) == pytest.approx(request.e2e, abs=EXACT)
        assert list(parts) == [key for key in KEYS if parts.get(key, 0.0) > 0.0]
        assert parts.get("preempted", 0.0) == pytest.approx(
            simulation.preempted(request), abs=EXACT
        )
        assert parts["front_end_in"] == pytest.approx(0.004, abs=2 * BEFORE_OUTPUT)
        queue = {key[6:]: seconds for key, seconds in parts.items() if key.startswith("queue.")}
        if not has_limits:
            assert queue.keys() <= {"unknown", "stalled"}
        elif request.joined or not is_pipelined:
            # A step that has been scheduled and has not ended may have changed the limit already.
            queue = {key: seconds for key, seconds in queue.items() if seconds > EXACT}
            hung, expected = queue.pop("stalled", 0.0), simulation.queue(request)
            assert sum(queue.values()) + hung == pytest.approx(sum(expected.values()), abs=EXACT)
            assert hung or queue == pytest.approx(expected, abs=EXACT)
        if request.outputs and not (request.left and request.left[0] < request.outputs[0]):
            missing = simulation.prefill(request) - parts.get("prefill", 0.0)
            assert -2 * BEFORE_OUTPUT <= missing <= parts.get("stalled", 0.0) + 2 * BEFORE_OUTPUT
        if not request.joined:
            assert all(key.startswith(("front", "queue")) for key in parts)
    again = play(divided(events, at), restarts)
    assert {n: one.parts for n, one in ended.items()} == {n: one.parts for n, one in again.items()}


@given(turns, st.lists(st.floats(-0.2, 0.2), min_size=1), cuts, st.booleans())
def test_parts_sum_to_what_the_front_end_reports(
    chosen: list[Turn], delays: list[float], restarts: list[int], is_first: bool
) -> None:
    """It may have ended a request before the core, at a stop string."""
    simulation = Simulation()
    events = simulation.run(chosen)
    sink = Sink()
    tracker = RequestTracker(sink=sink)
    tracker.reports.expected = True
    e2e = {}
    for at, event in enumerate(events):
        if at in restarts:
            tracker = restarted(tracker, sink)
        if not isinstance(event, Finished) or event.reason != 1:
            tracker.apply(RequestEvents(0, 0.0, 1, [event]))
            continue
        request = simulation.requests[event.request - 1]
        received = max(event.wall + delays[at % len(delays)], request.arrival + 0.0001)
        e2e[request.number] = received - request.arrival
        if is_first:
            tracker.reports.end_reported(request.arrival, received, None)
        tracker.apply(RequestEvents(0, 0.0, 1, [event]))
        if not is_first:
            tracker.reports.end_reported(request.arrival, received, None)
    tracker.reports.release()

    assert len(simulation.requests) == len(sink.ended)
    for request in simulation.requests:
        parts = sink.ended[request.number].parts
        assert parts is not None
        expected = e2e.get(request.number, request.e2e)
        assert sum(parts.values()) == pytest.approx(expected, abs=EXACT)
        assert all(seconds > 0.0 for seconds in parts.values())
        after = parts.get("front_end_out", 0.0)
        assert after == pytest.approx(max(expected - request.e2e, 0.0), abs=EXACT)


@pytest.mark.parametrize("run", CORE_RUNS)
def test_parts_sum_in_recorded_runs(run: str) -> None:
    """Of every request of a real engine, also in its record, whose numbers are rounded."""
    registry = Registry(DIALECTS.layouts(), tracking=Tracking(request_sink=lambda _: kept))
    kept = Kept(registry)
    trackers: dict[tuple[str, int], RequestTracker] = {}
    for stream, _, data in steps(run):
        item = None if data is None else DIALECTS.decode(data)
        if isinstance(item, RequestEvents):
            key = stream, item.engine
            tracker = trackers.setdefault(key, RequestTracker(sink=kept))
            tracker.apply(item)

    assert len(kept.records) > 10
    for record in kept.records:
        assert record.e2e_seconds is not None
        assert sum(record.parts.values()) == pytest.approx(record.e2e_seconds, abs=1.5 * EXACT)
        shown = sum(record.parts.get(part, 0.0) for part in ("preempted", "recompute"))
        assert (shown > 0.0) == (record.preemptions > 0)


def test_steps_that_are_always_apart_are_no_stalls() -> None:
    """The bound follows from the engine's own gaps."""
    events: list[Event] = [Queued(1, 1.0, WALL + 1.0, 5), Scheduled(1, 1.0)]
    events += [step(2.0 + n, 2.7 + n, [1]) for n in range(100)]
    events += [Queued(2, 102.0, WALL + 102.0), Scheduled(2, 102.0)]
    events += [step(102.0 + n, 102.7 + n, [1, 2]) for n in range(100)]

    parts = parts_of([*events, end(2, 201.7)], 2)

    assert parts == {"prefill": 0.7, "decode": 99.0}


def usual_steps() -> list[Event]:
    """Return a request with its prompt, and what an engine is known to take for steps with and without one."""
    events: list[Event] = [Queued(1, 1.0, WALL + 1.0), Scheduled(1, 1.0), step(1.0, 1.01, [1])]
    events += [step(1.01, 1.02, [1]), Queued(2, 1.02, WALL + 1.02), Scheduled(2, 1.02)]
    return [*events, step(1.02, 1.04, [1, 2]), end(2, 1.04)]


def test_a_step_that_takes_much_too_long_is_a_stall() -> None:
    """Of those in the batch and in the queue, also where the next batch was scheduled meanwhile."""
    events = [*usual_steps(), Queued(3, 1.04, WALL + 1.04), Scheduled(3, 1.041)]
    events += [Queued(4, 3.04, WALL + 3.04), step(1.04, 6.05, [1]), Scheduled(4, 6.05)]
    events += [step(1.041, 6.07, [1, 3]), step(6.05, 6.09, [1, 3, 4])]
    events += [end(number, 6.09) for number in (1, 3, 4)]

    # Steps also teach what is usual: a long one a little.
    assert parts_of(events, 1) == pytest.approx(
        {"prefill": 0.01, "decode": 0.05, "interference": 0.03, "stalled": 5.0}, abs=0.002
    )
    first = {"queue.none": 0.001, "prefill_gap": 0.009, "prefill": 0.02, "stalled": 5.0}
    assert parts_of(events, 3) == pytest.approx(
        first | {"decode": 0.01, "interference": 0.01}, abs=0.002
    )
    assert parts_of(events, 4) == {"queue.stalled": 3.01, "prefill": 0.02, "prefill_gap": 0.02}


def test_a_stall_while_a_prompt_is_computed_is_no_interference() -> None:
    """The prompt takes what one usually takes, and the rest is the stall's."""
    events = [*usual_steps(), Queued(3, 1.04, WALL + 1.04), Scheduled(3, 1.04)]
    events += [step(1.04, 9.06, [1, 3]), end(1, 9.06), end(3, 9.06)]

    assert parts_of(events, 1) == {
        "prefill": 0.01, "decode": 0.03, "interference": 0.02, "stalled": 8.0,
    }  # fmt: skip
    assert parts_of(events, 3) == {"prefill": 0.02, "stalled": 8.0}


def test_prompts_that_always_take_long_are_no_stalls() -> None:
    """Of videos among short prompts, whose tokens take a fiftieth, only the first few are taken for stalls."""
    times, now, before = EngineTimes(), 0.0, 0.0
    for _ in range(20):
        before = times.hung
        for seconds, prefilled in ((0.01, 0), *[(0.02, 300)] * 50, (3.0, 2000)):
            times.step(now, now + seconds, 32, prefilled)
            now += seconds

    assert 0.0 < before == times.hung


def test_a_front_end_does_not_know_which_steps_had_a_prompt() -> None:
    """All time until the first output is prefill."""
    events: list[Event] = [Queued(1, 1.0, WALL + 1.0), Scheduled(1, 1.5)]
    events += [Iteration(at, at, WALL + at, [Output(at, [1])], []) for at in (4.0, 6.0)]

    parts = parts_of([*events, end(1, 6.0)])

    assert parts == {"queue.unknown": 0.5, "prefill": 2.5, "decode": 2.0}


def test_a_step_counts_as_decode_until_one_without_prefill_is_known() -> None:
    """Nothing says yet what it would have taken."""
    events: list[Event] = [Queued(1, 1.0, WALL + 1.0), Scheduled(1, 1.0), step(1.0, 1.1, [1])]
    events += [Queued(2, 1.1, WALL + 1.1), Scheduled(2, 1.1), step(1.1, 1.4, [1, 2])]

    assert parts_of([*events, end(1, 1.4)]) == {"prefill": 0.1, "decode": 0.3}

    usual: list[Event] = [step(1.4, 1.41, [1]), step(1.41, 1.42, [1])]
    later: list[Event] = [Queued(3, 1.42, WALL + 1.42), Scheduled(3, 1.42)]
    parts = parts_of([*events, end(2, 1.4), *usual, *later, step(1.42, 1.73, [1, 3]), end(1, 1.73)])

    assert parts == {"prefill": 0.1, "decode": 0.33, "interference": 0.3}


def test_a_request_whose_beginning_is_unknown_has_no_parts() -> None:
    """Its events were lost, or it was there before the exporter."""
    alive = Alive(1, 5.0, RUNNING, WALL + 1.0, 7)
    events: list[Event] = [alive, Queued(2, 5.0, 0.0), Scheduled(2, 5.0)]
    events.append(step(5.0, 6.0, [1, 2, 3]))

    ended = play(divided([*events, end(1, 6.0), end(2, 6.0), end(3, 6.0), end(4, 6.0)]))

    assert {1: None, 2: None, 3: None, 4: None} == {n: one.parts for n, one in ended.items()}


def test_a_clock_that_has_stepped_back_yields_no_parts() -> None:
    """The latency would be negative."""
    events: list[Event] = [Queued(1, 1.0, WALL + 9.0), Scheduled(1, 1.0), step(1.0, 2.0, [1])]

    assert play(divided([*events, end(1, 2.0)]))[1].parts is None


def test_an_arrival_after_the_queue_takes_from_the_queue() -> None:
    """The clocks of two hosts differ; the parts still sum to the latency."""
    events: list[Event] = [Queued(1, 1.0, WALL + 1.2), Scheduled(1, 1.5), step(1.5, 2.0, [1])]

    assert parts_of([*events, end(1, 2.0)]) == {"queue.unknown": 0.3, "prefill": 0.5}


def test_a_restarted_engine_begins_anew() -> None:
    """Its clock may be behind that of the process before."""
    sink = Sink()
    tracker = RequestTracker(sink=sink)
    before: list[Event] = [Queued(1, 1e6, WALL), Scheduled(1, 1e6), step(1e6, 1e6 + 1, [1], SLOTS)]
    tracker.apply(RequestEvents(0, 1e6, 1, before))
    after: list[Event] = [
        Queued(2, 1.0, WALL + 1.0),
        step(1.0, 1.5, [], KV_BLOCKS),
        Scheduled(2, 2.0),
        step(2.0, 3.0, [2], NONE),
        end(2, 3.0),
    ]
    tracker.apply(RequestEvents(0, 3.0, 2, after))

    assert sink.ended[1].parts is None
    parts = sink.ended[2].parts
    assert parts is not None
    assert parts["queue.kv_blocks"] == pytest.approx(1.0)
    assert parts["prefill"] == pytest.approx(1.0)
