"""Request events and their intervals, compared with the definitions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers import ABORT, WALL, Scheduler, actions, by_definition, found
from sidestep.protocol.limits import MAX_OPEN_VALUES, OTHER
from sidestep.protocol.request_events import (
    ALL_KNOWN,
    PREEMPTED,
    RUNNING,
    WAITING,
    Alive,
    Event,
    Finished,
    Iteration,
    Output,
    Preempted,
    Prompt,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.tracking.requests.inflight import WAITS
from sidestep.tracking.requests.machine import RequestTracker
from sidestep.tracking.requests.outcomes import Outcomes
from sidestep.tracking.requests.parallel_samples import (
    MAX_WAITING_GROUPS,
    PEER_TIMEOUT,
    SampleGroups,
)
from sidestep.tracking.requests.settings import RequestSettings

STOP, LENGTH = 0, 1


def play(
    events: Sequence[Event], cuts: Sequence[int] = (), *, settings: RequestSettings | None = None
) -> list[Outcomes]:
    """Return the outcomes of ``events``, sent as items that end at ``cuts``."""
    tracker = RequestTracker(settings)
    ends = [*sorted({cut for cut in cuts if cut < len(events)}), len(events)]
    starts = [0, *ends[:-1]]
    return [
        tracker.apply(RequestEvents(0, 0.0, 1, list(events[start:end])))
        for start, end in zip(starts, ends, strict=True)
    ]


def step(stamp: float, *numbers: int, tokens: list[int] | None = None, **more: Any) -> Iteration:
    """Return an iteration in which each of ``numbers`` got a token."""
    output = Output(stamp, list(numbers), tokens or [])
    return Iteration(stamp - 0.01, stamp, WALL + stamp, [output], **more)


def end(number: int, stamp: float, reason: int = LENGTH, **more: Any) -> Finished:
    """Return a request's end, with the numbers that the engine reports."""
    return Finished(number, stamp, WALL + stamp, reason, **more)


@given(chosen=actions, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_any_run_equals_the_definitions(chosen: Any, cuts: list[int]) -> None:
    """Whatever the scheduler does and however its events are divided into items."""
    events = Scheduler().run(chosen)

    outcomes = play(events, cuts)

    assert by_definition(events) == found(outcomes)
    assert [{}] * len(outcomes) == [outcome.untracked for outcome in outcomes]
    assert sum(outcome.omitted for outcome in outcomes) == 0


numbers = st.integers(0, 4)
stamps = st.one_of(st.floats(0, 100), st.sampled_from([0.0, 1e15, 5.0]))
nonsense = st.one_of(
    st.builds(Queued, numbers, stamps, stamps, numbers, group=numbers, sample=numbers),
    st.builds(Scheduled, numbers, stamps),
    st.builds(Preempted, numbers, stamps),
    st.builds(Alive, numbers, stamps, st.integers(0, 9), adapter=st.sampled_from(["", "a"])),
    st.builds(Finished, numbers, stamps, stamps, st.integers(0, 9), stop_strings=st.booleans()),
    st.builds(
        Iteration,
        stamps,
        stamps,
        stamps,
        outputs=st.lists(
            st.builds(Output, stamps, st.lists(numbers, min_size=2, max_size=2))
            | st.builds(
                Output,
                stamps,
                st.lists(numbers, min_size=2, max_size=2),
                st.lists(numbers, min_size=2, max_size=2),
            ),
            max_size=2,
        ),
        scheduled=st.none() | st.lists(numbers, max_size=3),
        prompts=st.lists(st.builds(Prompt, numbers, numbers, numbers), max_size=2),
    ),
)


@given(
    events=st.lists(nonsense, max_size=40),
    settings=st.builds(
        RequestSettings,
        st.sampled_from(["first", "last"]),
        st.sampled_from(["output", "token"]),
        capacity=st.integers(1, 5),
        max_age=st.floats(1, 50),
    ),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_arbitrary_events_have_no_impossible_outcome(
    events: list[Event], settings: RequestSettings, cuts: list[int]
) -> None:
    """No interval is negative or observed twice; limits hold, and no count is negative."""
    tracker = RequestTracker(settings)
    outcomes = []
    for event in events:
        outcomes.append(tracker.apply(RequestEvents(0, 0.0, 1, [event])))
        requests = tracker.requests
        assert len(requests.live) <= settings.capacity
        assert requests.waiting_tokens >= 0
        waiting = [r.prompt_tokens for r in requests.live.values() if r.state in WAITS]
        assert requests.waiting_prompt_tokens == sum(waiting)
        assert requests.prefill_tokens == sum(r.unfilled for r in requests.live.values()) >= 0
        assert requests.preempted.keys() <= requests.live.keys()
        assert all(count > 0 for count in requests.adapters.values())
        assert requests.prefilling <= requests.live.keys()

    for outcome in outcomes:
        ended = outcome.iteration.finished_requests
        intervals = [
            *outcome.iteration.inter_token_latencies_iter,
            *(run.value for run in outcome.iteration.inter_token_latencies_iter_runs),
            *outcome.iteration.time_to_first_tokens_iter,
            *outcome.preempted_seconds,
            *(v for r in ended for v in (r.queued_time, r.prefill_time, r.decode_time)),
            *(v for r in ended for v in (r.inference_time, r.e2e_latency)),
            *(v for r in ended for v in (r.mean_time_per_output_token,)),
            *(v for s in outcome.steps for v in (s.duration, s.interval)),
        ]
        assert all(v is None or (v >= 0 and math.isfinite(v)) for v in intervals)
    ends = sum(isinstance(event, Finished) for event in events)
    assert ends == sum(len(o.iteration.finished_requests) for o in outcomes)
    queued = sum(isinstance(event, Queued) for event in events)
    times = [
        r for o in outcomes for r in o.iteration.finished_requests if r.queued_time is not None
    ]
    assert len(times) <= queued
    assert found(outcomes) == found(play(events, cuts, settings=settings))


@pytest.mark.parametrize(("rule", "queue", "prefill"), [("first", 2.0, 8.0), ("last", 9.0, 1.0)])
def test_a_setting_chooses_which_scheduling_ends_the_queue(
    rule: Any, queue: float, prefill: float
) -> None:
    """The first, as in the engine, or the last before the first output."""
    events: list[Event] = [
        Queued(1, 10.0, WALL, 5),
        Scheduled(1, 12.0),
        Preempted(1, 13.0),
        Scheduled(1, 19.0),
        step(20.0, 1),
        Preempted(1, 21.0),
        Scheduled(1, 22.0),
        step(23.0, 1),
        end(1, 23.0),
    ]

    (outcome,) = play(events, settings=RequestSettings(scheduled=rule))

    (request,) = outcome.iteration.finished_requests
    assert (queue, prefill, 3.0) == (
        request.queued_time,
        request.prefill_time,
        request.decode_time,
    )


@pytest.mark.parametrize(("rule", "latencies"), [("output", {3.0: 1}), ("token", {1.0: 3})])
def test_a_setting_chooses_how_a_gap_before_several_tokens_counts(
    rule: Any, latencies: dict[float, int]
) -> None:
    """Once, as in vLLM, or divided among the tokens."""
    events: list[Event] = [
        Queued(1, 1.0, WALL),
        Scheduled(1, 1.0),
        step(2.0, 1),
        step(5.0, 1, tokens=[3]),
        end(1, 5.0),
    ]

    (outcome,) = outcomes = play(events, settings=RequestSettings(latency=rule))

    assert latencies == found(outcomes).between
    (request,) = outcome.iteration.finished_requests
    assert (4, 1.0) == (request.num_generation_tokens, request.mean_time_per_output_token)


def test_an_abort_after_output_may_be_a_stop_string() -> None:
    """Before any output, or without stop strings, it is an abort."""
    events: list[Event] = [
        Queued(1, 1.0, WALL),
        Scheduled(1, 2.0),
        step(3.0, 1),
        end(1, 4.0, ABORT, stop_strings=True, generation_tokens=1),
        Queued(2, 5.0, WALL),
        end(2, 6.0, ABORT, stop_strings=True),
    ]

    (outcome,) = play(events)

    assert [STOP, ABORT] == [r.finish_reason for r in outcome.iteration.finished_requests]
    assert outcome.iteration.finished_requests[0].queued_time == 1.0
    assert len(outcome.aborted) == 1


def test_the_clocks_of_two_hosts_are_never_compared() -> None:
    """A group waits by the clock of the engine whose sample ended last."""
    sample_groups = SampleGroups()
    old, young = (
        RequestTracker(sample_groups=sample_groups),
        RequestTracker(sample_groups=sample_groups),
    )
    old.apply(RequestEvents(0, 1e6, 1, [Queued(1, 1e6, WALL, group=7), end(1, 1e6 + 1)]))
    young.apply(RequestEvents(0, 10.0, 1, [Queued(1, 10.0, WALL, group=7, sample=1)]))
    young.apply(RequestEvents(0, 11.0, 1, [end(1, 11.0)]))

    young.apply(RequestEvents(0, 15.0, 1))
    waited = old.apply(RequestEvents(0, 1e6 + 2, 1)).iteration.n_params_iter
    young.apply(RequestEvents(0, 16.0, 1))
    ended = old.apply(RequestEvents(0, 1e6 + 2, 1)).iteration.n_params_iter

    assert ([], [2]) == (waited, ended)

    old.apply(RequestEvents(0, 1e6, 1, [Queued(2, 1e6, WALL, group=8), end(2, 1e6)]))
    restarted = old.apply(RequestEvents(0, 1.0, 2, [Queued(1, 1.0, WALL)]))

    assert {"samples": 1} == restarted.untracked
    aged = old.apply(RequestEvents(0, 1e5, 2))
    assert {"age": 1} == aged.untracked


class Ranks:
    """Two ranks of one deployment, of which each has a sample of one request.

    The first rank's sample ends at 2 s; the second rank has its own from 1 s to 1.5 s.
    """

    def __init__(self, *, samples: int = 2, deployment: str = "") -> None:
        self.groups = SampleGroups()
        self.first = RequestTracker(sample_groups=self.groups)
        self.second = RequestTracker(sample_groups=self.groups, deployment=deployment)
        self.tick(self.first, 0.5)
        self.tick(self.second, 0.5)
        for sample in range(samples - 1):
            self._apply(self.first, sample, 2.0)
        self._last = samples - 1

    def late(self) -> Outcomes:
        """Apply what the second rank has recorded of its sample."""
        return self._apply(self.second, self._last, 1.5)

    def _apply(self, tracker: RequestTracker, sample: int, ended: float) -> Outcomes:
        asked = Queued(sample, 1.0, WALL + 1.0, group=7, sample=sample)
        return tracker.apply(RequestEvents(0, ended, 1, [asked, end(sample, ended)]))

    def tick(self, tracker: RequestTracker, now: float) -> Outcomes:
        """Let a rank report that all requests until ``now`` are known."""
        return tracker.apply(RequestEvents(0, now, 1, [], WALL + now))


def counted(outcomes: Iterable[Outcomes]) -> tuple[list[int], Counter[str]]:
    """Return the numbers of parallel samples that were observed, and the untracked requests."""
    found = list(outcomes)
    untracked: Counter[str] = Counter()
    for outcome in found:
        untracked.update(outcome.untracked)
    return [n for outcome in found for n in outcome.iteration.n_params_iter], untracked


def seconds(start: float, until: float) -> list[float]:
    """Return every second from ``start`` to ``until``."""
    return [start + second for second in range(int(until - start) + 1)]


def test_a_group_waits_for_a_rank_that_was_paused() -> None:
    """A rank's events may arrive when the other rank's clock is far ahead; the group counts once."""
    ranks = Ranks()
    ahead = [ranks.tick(ranks.first, now) for now in seconds(3.0, 50.0)]
    assert counted(ahead) == ([], Counter())

    behind = [ranks.late(), *(ranks.tick(ranks.second, now) for now in seconds(2.0, 50.0))]
    after = [ranks.tick(ranks.first, 51.0)]

    assert counted([*behind, *after]) == ([2], Counter())


@pytest.mark.parametrize("samples", [2, 3])
def test_a_group_that_a_rank_never_completed_is_unknown(samples: int) -> None:
    """Samples that arrive later count neither as a request with fewer samples nor a second time."""
    ranks = Ranks(samples=samples)
    ahead = [ranks.tick(ranks.first, now) for now in seconds(3.0, 7.0 + PEER_TIMEOUT)]
    assert counted(ahead) == ([], Counter(samples=1))

    behind = [ranks.late(), *(ranks.tick(ranks.second, now) for now in seconds(2.0, 80.0))]
    after = [ranks.tick(ranks.first, now) for now in seconds(70.0, 90.0)]

    assert counted([*behind, *after]) == ([], Counter())
    assert {} == ranks.groups.groups


def test_events_that_a_rank_lost_make_its_groups_unknown() -> None:
    """Folded items may have had a sample; later requests count again."""
    ranks = Ranks(samples=3)
    ranks.second.skip(0)
    both = (ranks.first, ranks.second)
    found = [ranks.tick(tracker, now) for now in seconds(3.0, 70.0) for tracker in both]
    assert counted(found) == ([], Counter(samples=1))

    found = [ranks.first.apply(RequestEvents(0, 71.0, 1, two_samples(8, 70.0)))]
    found += [ranks.tick(tracker, now) for now in seconds(72.0, 80.0) for tracker in both]
    assert counted(found) == ([2], Counter())


def two_samples(group: int, asked: float) -> list[Event]:
    """Return the events of a request whose two samples end one second after its arrival."""
    return [
        event
        for sample in range(2)
        for event in (
            Queued(20 + sample, asked, WALL + asked, group=group, sample=sample),
            end(20 + sample, asked + 1.0),
        )
    ]


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "another deployment"])
def test_some_ranks_are_not_waited_for(is_closed: bool) -> None:
    """One that has closed knows all of its requests; one of another deployment has none of these."""
    ranks = Ranks(samples=3, deployment="" if is_closed else "another")
    if is_closed:
        ranks.second.apply(RequestEvents(0, 2.0, 1, [], ALL_KNOWN))
    assert counted(ranks.tick(ranks.first, now) for now in seconds(3.0, 8.0)) == ([2], Counter())


def test_adapters_are_limited_and_printable() -> None:
    """Other names share one label value."""
    tracker = RequestTracker()
    names = ["bad\n", *(f"a{number}" for number in range(MAX_OPEN_VALUES + 6)), "a0"]
    queued: list[Event] = [Queued(n, 1.0, adapter=name) for n, name in enumerate(names)]

    outcome = tracker.apply(RequestEvents(0, 1.0, 1, queued))

    adapters = tracker.requests.adapters
    assert MAX_OPEN_VALUES == len(adapters)
    assert 2 == adapters["a0", "waiting"]
    assert outcome.limited == adapters[OTHER, "waiting"] > 6


def test_alive_events_name_the_requests_in_flight() -> None:
    """A waiting request has intervals from its scheduling on, a running one has none."""
    events: list[Event] = [
        Alive(1, 5.0, WAITING, WALL + 1.0, 10),
        Alive(2, 5.0, RUNNING, WALL + 2.0, 20, "ada"),
        Alive(3, 5.0, PREEMPTED, WALL + 3.0, 40),
        Scheduled(1, 6.0),
        step(8.0, 1, 2, prompts=[Prompt(1, 10)]),
        end(1, 8.0),
        end(2, 8.0),
    ]
    tracker = RequestTracker()

    outcome = tracker.apply(RequestEvents(0, 0.0, 1, events))

    first, second = outcome.iteration.finished_requests
    assert [7.0] == outcome.iteration.time_to_first_tokens_iter
    assert (None, 2.0, 7.0) == (first.queued_time, first.prefill_time, first.e2e_latency)
    assert (None, None, 6.0) == (second.queued_time, second.prefill_time, second.e2e_latency)
    assert {3: 5.0} == tracker.requests.preempted
    assert 40 == tracker.requests.waiting_tokens
    assert outcome.untracked == {"unknown": 3}


def test_a_request_that_was_cut_off_counts_once() -> None:
    """A sender that dropped events restarts, and names the requests in flight."""
    tracker = RequestTracker()
    queued: list[Event] = [Queued(number, 1.0, WALL) for number in range(5)]
    tracker.apply(RequestEvents(0, 1.0, 1, queued))
    alive: list[Event] = [Alive(number, 2.0, WAITING, WALL) for number in range(1, 7)]

    outcome = tracker.apply(RequestEvents(0, 2.0, 2, alive))

    # Six are there, of whom one was not known before.
    assert {"restart": 5, "unknown": 1} == outcome.untracked


def test_a_restarted_engine_reuses_numbers() -> None:
    """Requests in flight count as cut off; their numbers mean other requests."""
    tracker = RequestTracker()
    tracker.apply(RequestEvents(0, 0.0, 1, [Queued(1, 1.0, WALL, 8), Scheduled(1, 2.0)]))

    outcome = tracker.apply(
        RequestEvents(0, 0.0, 2, [Queued(1, 0.5, WALL, 8), Scheduled(1, 0.75), step(1.5, 1)])
    )

    assert {"restart": 1} == outcome.untracked
    assert 0 == tracker.requests.waiting_tokens
    assert [None] == [s.interval for s in outcome.steps]


def test_requests_over_the_limit_count_once() -> None:
    """They have no intervals; their tokens and their ends count."""
    events: list[Event] = [
        Queued(1, 1.0, WALL),
        Queued(2, 1.0, WALL),
        Scheduled(1, 2.0),
        Scheduled(2, 2.0),
        step(3.0, 1, 2),
        step(4.0, 1, 2),
        end(2, 4.0, generation_tokens=2),
    ]

    (outcome,) = play(events, settings=RequestSettings(capacity=1))

    assert {"capacity": 1} == outcome.untracked
    assert outcome.iteration.num_generation_tokens == 4
    assert [1.0] == outcome.iteration.inter_token_latencies_iter
    (request,) = outcome.iteration.finished_requests
    assert (2, None) == (request.num_generation_tokens, request.decode_time)


def test_a_request_that_never_ends_expires() -> None:
    """Its age counts from its first event; it is counted once."""
    events: list[Event] = [
        Queued(1, 1.0, WALL, 100),
        Queued(2, 50.0, WALL, 10),
        Queued(3, 102.0, WALL, 1),
        Scheduled(1, 103.0),
    ]
    tracker = RequestTracker(RequestSettings(max_age=100.0))

    outcome = tracker.apply(RequestEvents(0, 0.0, 1, events))

    assert {"age": 1} == outcome.untracked
    assert {2, 3} == tracker.requests.live.keys()
    assert 11 == tracker.requests.waiting_tokens


def test_groups_that_wait_for_samples_are_limited() -> None:
    """If no time passes, the oldest ends."""
    sample_groups = SampleGroups()
    tracker = RequestTracker(sample_groups=sample_groups)
    for number in range(MAX_WAITING_GROUPS + 10):
        asked = Queued(number, 1.0, WALL, group=number + 1)
        tracker.apply(RequestEvents(0, 1.0, 1, [asked, end(number, 1.0)]))

    assert MAX_WAITING_GROUPS == len(sample_groups.groups)
