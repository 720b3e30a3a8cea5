"""State of a polled target after requests, responses and failures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidestep_adapters.polling.state import GRACE, PATIENT, STATES, PollState

CAUSES = ("unreachable", "slow", "truncated", "bad_answer", "http_503", "unreadable")


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
