"""KV block-seconds of requests, compared with a count block by block."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given

from schedulers import Scheduler, actions
from sidestep.protocol.request_events import (
    Event,
    Finished,
    Iteration,
    Output,
    Preempted,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.tracking.requests.machine import RequestTracker

SIZE = 4


def held(events: Sequence[Event], size: int = SIZE) -> float:
    """Return the block-seconds of all requests, from one item an event."""
    tracker = RequestTracker()
    tracker.block_size = size
    return (
        sum(tracker.apply(RequestEvents(0, 0.0, 1, [event])).held_micros for event in events) / 1e6
    )


def output(stamp: float, tokens: int = 1) -> Event:
    """Return a step with output of request 1."""
    return Iteration(stamp, stamp, 1e9 + stamp, [Output(stamp, [1], [tokens])])


def queued(tokens: int) -> Event:
    """Return the arrival of request 1."""
    return Queued(1, 100.0, 1e9, tokens)


def test_the_prompt_until_the_first_output() -> None:
    """Ten tokens fill three blocks of four, from the batch to the first output and until the end."""
    events = [queued(9), Scheduled(1, 101.0), output(103.0), Finished(1, 103.0, 1e9 + 103, 0, 9, 1)]
    assert held(events) == 2.0 * 3
    assert held(events, 0) == 0.0


def test_growth_to_the_last_output() -> None:
    """Blocks are added evenly between the first output and the end."""
    events = [
        queued(8), Scheduled(1, 101.0), output(102.0),
        *(output(102.0 + n) for n in range(1, 9)), Finished(1, 110.0, 1e9, 0, 8, 9),
    ]  # fmt: skip
    assert held(events) == 1.0 * 2 + 8.0 * (2 + 5) / 2


def test_a_preempted_request_holds_nothing() -> None:
    """It counts when it leaves the batch, and again from when it returns."""
    before: list[Event] = [queued(4), Scheduled(1, 101.0), output(102.0), Preempted(1, 103.0)]
    assert held(before) == 1.0 + 1.0 * (1 + 2) / 2
    after: list[Event] = [Scheduled(1, 150.0), Finished(1, 151.0, 1e9, 0, 4, 1)]
    assert held([*before, *after]) == held(before) + 1.0 * 2


def test_a_request_that_never_ran() -> None:
    """Waiting requests hold no blocks."""
    assert held([queued(4), Finished(1, 150.0, 1e9, 3, 4, 0)]) == 0.0


@given(actions)
def test_bounds(chosen: list[tuple[str, int, int]]) -> None:
    """The total lies between the blocks of all prompts and those of all tokens, times the time in the batch."""
    events = Scheduler().run(chosen)
    tokens = {e.request: e.prompt_tokens for e in events if isinstance(e, Queued)}
    finished = {e.request: e for e in events if isinstance(e, Finished)}
    low = high = 0.0
    since: dict[int, float] = {}
    for event in events:
        if isinstance(event, Scheduled):
            since[event.request] = event.stamp
        elif isinstance(event, Preempted | Finished) and event.request in since:
            seconds = event.stamp - since.pop(event.request)
            prompt = tokens[event.request]
            low += seconds * -(-prompt // SIZE)
            high += seconds * -(-(prompt + finished[event.request].generation_tokens) // SIZE)
    assert low - 1e-3 <= held(events) <= high + 1e-3
