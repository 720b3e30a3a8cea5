"""What a polled target's state is after whatever was asked and answered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.config.poll_state import GRACE, PATIENT, STATES, PollState

CAUSES = ("unreachable", "slow", "truncated", "bad_answer", "http_503", "unreadable")


def asked(interval: float = 1.0, *, answered: bool = True) -> PollState:
    """A target that was asked at 0, and asked again at 10 if it answered."""
    state = PollState(interval)
    state.started(0.0)
    if answered:
        state.answered()
        state.started(10.0)
    return state


def test_nothing_is_shown_before_the_first_answer() -> None:
    """However long it takes; with it the target is up at once."""
    state = asked(answered=False)

    assert [state.tick(now) for now in (0.5, 5.0, 100.0)] == ["down"] * 3
    assert state.answered() == "up"


def test_an_answer_that_is_late_makes_it_stale() -> None:
    """And half a minute later nothing is shown; an answer makes all well again."""
    state = asked()

    assert [state.tick(10.0 + late) for late in (0.0, 1.0, 1.1, 29.9)] == [
        "up",
        "up",
        "stale",
        "stale",
    ]
    assert state.tick(10.0 + GRACE) == "down"
    assert state.answered() == "up"
    assert state.tick(1000.0) == "up"


def test_patience_counts_from_the_first_question_without_an_answer() -> None:
    """A server that is asked again and again meanwhile is not younger for it."""
    state = asked()
    found = []
    for now in (20.0, 30.0, 40.0):
        found.append(state.failed("slow", now))
        state.started(now)

    assert found == ["stale", "stale", "down"]


@pytest.mark.parametrize("cause", CAUSES)
def test_only_what_says_nothing_about_the_server_is_forgiven(cause: str) -> None:
    """Every other failure is an answer: there is no page."""
    state = asked()

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
def test_a_state_says_what_was_last_heard(events: list[tuple[float, str]], interval: float) -> None:
    """Whatever comes in whatever order: held against all that happened."""
    state = PollState(interval)
    now = 0.0
    answered = False
    """Since anything else that the server had to say."""
    since: float | None = None
    for pause, event in events:
        now += pause
        # The clock of an exporter ticks, many times a second.
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
