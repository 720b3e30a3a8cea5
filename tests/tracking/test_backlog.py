"""The tokens that are still to be prefilled, compared with the requests' own events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given

from schedulers import Scheduler, actions
from sidestep.protocol.request_events import (
    Event,
    Finished,
    Iteration,
    Preempted,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.tracking.requests.inflight_state import capture_tracker, restore
from sidestep.tracking.requests.machine import RequestTracker


def backlog(tracker: RequestTracker) -> tuple[int, int]:
    """Return the prompt tokens that wait, and all tokens that are still to be prefilled."""
    return tracker.requests.waiting_prompt_tokens, tracker.requests.prefill_tokens


def by_definition(events: Sequence[Event]) -> tuple[int, int]:
    """Return the same of the events so far, request by request."""
    prompts = {event.request: event.prompt_tokens for event in events if isinstance(event, Queued)}
    waiting, unfinished = 0, 0
    for number, prompt in prompts.items():
        state, left, tokens = "", 0, 0
        for event in events:
            if isinstance(event, Iteration):
                computed = dict(zip(*event.batch, strict=True)).get(number, 0)
                left = max(left - computed, 0) if state == "prefill" else left
                made = [
                    count
                    for output in event.outputs
                    for each, count in zip(
                        output.requests, output.tokens or [1] * len(output.requests), strict=True
                    )
                    if each == number
                ]
                tokens += sum(made)
                if made and state == "prefill":
                    state, left = "decode", 0
            elif event.request != number:
                continue
            elif isinstance(event, (Queued, Preempted)):
                state, left = "waits", prompt + tokens
            elif isinstance(event, Scheduled):
                state = "prefill"
            elif isinstance(event, Finished):
                state, left = "", 0
        waiting += prompt if state == "waits" else 0
        unfinished += left
    return waiting, unfinished


@given(chosen=actions)
def test_any_run_equals_the_definition(chosen: Any) -> None:
    """After each event, and after a restart of the exporter there."""
    events = Scheduler().run(chosen)
    tracker = RequestTracker()
    for count, event in enumerate(events, 1):
        tracker.apply(RequestEvents(0, 0.0, 1, [event]))
        assert by_definition(events[:count]) == backlog(tracker)
        restored = RequestTracker()
        for state in capture_tracker("e", tracker):
            again = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=type(state))
            restore(restored, again)
        assert backlog(tracker) == backlog(restored)
