"""Throttling of peers that send invalid messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from exporters import Start, until
from sidestep.transport.guard import LIMIT, Throttle
from socket_peers import batch, connect, step, tokens


def full(throttle: Throttle, peer: bytes, now: float) -> None:
    """Send as many invalid messages as are tolerated."""
    for _ in range(LIMIT):
        assert not throttle.count_invalid(peer, now)


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 100)), max_size=300))
def test_the_tables_are_bounded(events: list[tuple[int, float]]) -> None:
    """The oldest entry is evicted."""
    throttle = Throttle(capacity=4)
    for peer, now in sorted(events, key=lambda event: event[1]):
        for _ in range(LIMIT // 40):
            throttle.count_invalid(bytes([peer]), now)
        throttle.ignores(bytes([peer]), now)
        assert len(throttle) <= 8


def test_many_peers_do_not_evict_the_busiest_one() -> None:
    """Peers that sent less recently are evicted first."""
    throttle = Throttle(capacity=8)
    ignored = False
    for number in range(LIMIT + 1):
        for stranger in range(3):
            throttle.count_invalid(f"stranger {number} {stranger}", 0.0)
        ignored = throttle.count_invalid(b"p", 0.0)

    assert ignored


async def test_messages_of_a_throttled_peer_are_not_read(start: Start) -> None:
    """They are counted, even valid ones; other peers are not affected."""
    async with start() as exporter, connect(exporter) as good, connect(exporter) as bad:
        await good.send_hello("good")
        for _ in range(LIMIT + 20):
            await bad.send(b"\xc1")
        await until(lambda: exporter.metrics.value("sidestep_rejected_total", "throttled") == 19)
        await bad.send(b"")
        await until(lambda: exporter.metrics.value("sidestep_rejected_total", "throttled") == 20)
        await good.send(batch(1, step()))
        await until(lambda: tokens(exporter, "good0") == 1)

        assert exporter.metrics.value("sidestep_rejected_total", "bad_schema") == LIMIT + 1


async def test_need_hello_is_not_an_invalid_message(start: Start) -> None:
    """A sender with many frames in flight gets hundreds of them from a new exporter."""
    async with start() as exporter, connect(exporter) as peer:
        for _ in range(LIMIT * 3):
            await peer.send(batch(1, step()))
        await until(lambda: exporter.metrics.value("sidestep_messages_total", "batch") == LIMIT * 3)

        assert exporter.metrics.value("sidestep_rejected_total", "throttled") == 0
