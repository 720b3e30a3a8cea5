"""Peers that send nonsense, in time that the test makes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters import Start, until
from sidestep.transport.throttle import LIMIT, PENALTY, PERIOD, Throttle
from socket_peers import batch, connect, step, tokens


def full(throttle: Throttle, peer: bytes, now: float) -> None:
    """As many bad messages as are forgiven."""
    for _ in range(LIMIT):
        assert not throttle.bad(peer, now)


def test_more_than_the_limit_within_a_second_is_ignored_for_a_while() -> None:
    """Not one less, and not for ever; who comes back starts anew."""
    throttle = Throttle()
    full(throttle, b"p", 0.0)
    assert not throttle.ignores(b"p", 0.5)
    assert throttle.bad(b"p", 0.9)

    assert throttle.ignores(b"p", 0.9 + PENALTY - 0.01)
    assert not throttle.ignores(b"p", 0.9 + PENALTY)
    full(throttle, b"p", 0.9 + PENALTY)


def test_the_same_over_a_longer_time_is_forgiven() -> None:
    """A hundred a second, second after second, never ends in it."""
    throttle = Throttle()
    for second in range(20):
        full(throttle, b"p", second * PERIOD)

    assert not throttle.ignores(b"p", 20.0)


def test_nobody_else_is_ignored() -> None:
    """A peer pays for itself alone."""
    throttle = Throttle()
    full(throttle, b"p", 0.0)
    full(throttle, b"q", 0.0)
    throttle.bad(b"p", 0.0)

    assert throttle.ignores(b"p", 0.1)
    assert not throttle.ignores(b"q", 0.1)


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 100)), max_size=300))
def test_no_number_of_peers_grows_the_table(events: list[tuple[int, float]]) -> None:
    """It forgets the one it has known longest."""
    throttle = Throttle(capacity=4)
    for peer, now in sorted(events, key=lambda event: event[1]):
        for _ in range(LIMIT // 40):
            throttle.bad(bytes([peer]), now)
        throttle.ignores(bytes([peer]), now)
        assert len(throttle) <= 8


@pytest.mark.parametrize("strangers", [1, 2, 3])
def test_a_flood_of_strangers_does_not_free_the_busiest(strangers: int) -> None:
    """Counting goes on for who keeps sending: others are forgotten first."""
    throttle = Throttle(capacity=8)
    ignored = False
    for number in range(LIMIT + 1):
        for stranger in range(strangers):
            throttle.bad(f"stranger {number} {stranger}", 0.0)
        ignored = throttle.bad(b"p", 0.0)

    assert ignored


async def test_a_nonsense_peer_is_not_heard_any_more(start: Start) -> None:
    """What it sends then is counted unread, even if it were good; others are heard."""
    async with start() as exporter, connect(exporter) as good, connect(exporter) as bad:
        await good.greet("good")
        for _ in range(LIMIT + 20):
            await bad.say(b"\xc1")
        await until(lambda: exporter.metrics.value("sidestep_rejected_total", "throttled") == 19)
        await bad.say(b"")
        await until(lambda: exporter.metrics.value("sidestep_rejected_total", "throttled") == 20)
        await good.say(batch(1, step()))
        await until(lambda: tokens(exporter, "good0") == 1)

        assert exporter.metrics.value("sidestep_rejected_total", "bad_schema") == LIMIT + 1


async def test_asking_for_a_hello_is_no_nonsense(start: Start) -> None:
    """A sender with much under way earns hundreds of these when the exporter is a new one."""
    async with start() as exporter, connect(exporter) as peer:
        for _ in range(LIMIT * 3):
            await peer.say(batch(1, step()))
        await until(lambda: exporter.metrics.value("sidestep_messages_total", "batch") == LIMIT * 3)

        assert exporter.metrics.value("sidestep_rejected_total", "throttled") == 0
