"""State of a polled target after requests, responses and failures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep_adapters.polling.state import GRACE, PATIENT, STATES, PollState

CAUSES = ("unreachable", "slow", "truncated", "bad_answer", "http_503", "unreadable")


def polled(interval: float = 1.0, *, answered: bool = True) -> PollState:
    """Return a target polled at 0, and again at 10 if it answered."""
    state = PollState(interval)
    state.started(0.0)
    if answered:
        state.answered()
        state.started(10.0)
    return state


def test_the_grace_period_counts_from_the_first_unanswered_request() -> None:
    """Further requests do not extend it."""
    state = polled()
    found = []
    for now in (20.0, 30.0, 40.0):
        found.append(state.failed("slow", now))
        state.started(now)

    assert found == ["stale", "stale", "down"]


@pytest.mark.parametrize("cause", CAUSES)
def test_failures_of_the_server_make_it_down_at_once(cause: str) -> None:
    """A slow response or an unreadable local file does not."""
    state = polled()

    assert state.failed(cause, 10.5) == ("up" if cause in PATIENT else "down")
    assert state.is_shown == (cause in PATIENT)


EVENTS = st.lists(
    st.tuples(
        st.floats(0.0, 40.0),
        st.sampled_from(["tick", "started", "answered", *CAUSES]),
    ),
    max_size=40,
)


@given(EVENTS, st.floats(0.05, 60.0))
def test_the_state_follows_from_all_events(
    events: list[tuple[float, str]], interval: float
) -> None:
    """Any events in any order give the state of a plain model."""
    state = PollState(interval)
    now = 0.0
    answered = False
    """True if the last response is still exposed."""
    since: float | None = None
    for pause, event in events:
        now += pause
        # An exporter calls tick() many times a second.
        late = now - since if since is not None else 0.0
        if answered and late >= GRACE:
            answered = False
        if event == "answered":
            answered, since = True, None
            assert state.answered() == "up"
            continue
        if event == "started":
            since = now if since is None else since
            found = state.started(now)
        elif event == "tick":
            found = state.tick(now)
        else:
            found = state.failed(event, now)
            if event not in PATIENT:
                answered, since = False, None
        assert found == state.state
        assert state.state in STATES
        assert state.is_shown == answered
        late = now - since if since is not None else 0.0
        assert (state.state == "stale") <= (late > interval) or late == 0.0
        assert (state.state == "up") <= (late <= interval or late >= GRACE or not answered)
