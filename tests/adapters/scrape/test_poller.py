"""When a target is polled, and how its responses are applied in slices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from exporters import until
from sidestep.config.scrape_targets import parse
from sidestep.errors import PollError
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep_adapters.scrape.poller import Poller, PollQuery

NAME = "http://h/metrics"
PREFIX = "sidestep_scrape_"


class FakeTarget:
    """A target that responds with numbers."""

    def __init__(self) -> None:
        self.questions = 0
        self.failing: Exception | None = None
        self.entered = False
        self.taken: list[int] = []
        self.hidden = 0
        self.woken = 0

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Callable[[], Awaitable[int]]]:
        """Open a connection."""
        self.entered = True
        try:
            yield self.ask
        finally:
            self.entered = False

    async def ask(self) -> int:
        """Send one request."""
        self.questions += 1
        await asyncio.sleep(0)
        if self.failing is not None:
            raise self.failing
        return self.questions

    def take(self, answer: int) -> Iterator[None]:
        """Apply a response in three slices; a negative number is invalid."""
        for _ in range(3):
            self.taken.append(answer)
            yield
        if answer == 2:
            raise PollError("bad_answer", "two")

    def hide(self) -> None:
        """Count that the response is hidden."""
        self.hidden += 1

    def wake(self) -> None:
        """Count that the poller has a response."""
        self.woken += 1


@pytest.fixture
async def polling() -> AsyncIterator[tuple[FakeTarget, Poller[int], SelfMetrics]]:
    """Yield a target and its poller, which polls as often as possible."""
    made, metrics = FakeTarget(), SelfMetrics()
    question = PollQuery(made.connect, made.take, made.hide)
    poller = Poller(parse(f"{NAME},interval=0.05"), question, metrics, PREFIX)
    poller.open(made.wake)
    yield made, poller, metrics
    poller.close()
    await until(lambda: not made.entered)


async def test_the_next_request_waits_until_the_response_is_applied(
    polling: tuple[FakeTarget, Poller[int], SelfMetrics],
) -> None:
    """A response is applied one slice at a time."""
    made, poller, metrics = polling
    await until(lambda: made.woken == 1)
    await asyncio.sleep(0.2)
    assert (made.questions, made.taken) == (1, [])
    assert not poller.state.is_shown
    assert [poller.receive(0.0) for _ in range(5)] == [True, True, True, False, False]
    assert made.taken == [1, 1, 1]
    assert poller.state.state == "up"
    await until(lambda: made.woken == 2)

    assert metrics.value(f"{PREFIX}polls_total", NAME, "ok") == 1


async def test_an_invalid_response_fails_the_poll(
    polling: tuple[FakeTarget, Poller[int], SelfMetrics],
) -> None:
    """It fails while it is applied; the next one may be valid."""
    made, poller, metrics = polling
    for number in (1, 2, 3):
        await until(lambda number=number: made.woken == number)  # type: ignore[misc]
        while poller.receive(0.0):
            pass
        assert made.hidden == (number > 1)
        assert poller.state.state == ("down" if number == 2 else "up")

    assert metrics.value(f"{PREFIX}polls_total", NAME, "bad_answer") == 1


async def test_the_response_of_a_silent_target_is_hidden(
    polling: tuple[FakeTarget, Poller[int], SelfMetrics],
) -> None:
    """It is hidden once, by the clock; slow responses alone do not hide it."""
    made, poller, _ = polling
    await until(lambda: made.woken == 1)
    while poller.receive(0.0):
        pass
    made.failing = PollError("slow", "")
    await until(lambda: made.questions >= 3)
    assert (poller.state.is_shown, made.hidden) == (True, 0)
    loop = asyncio.get_running_loop()
    for _ in range(2):
        poller.pass_time(loop.time() + 31)

    assert (poller.state.state, made.hidden) == ("down", 1)


async def test_cut_restarts_polling(polling: tuple[FakeTarget, Poller[int], SelfMetrics]) -> None:
    """A partly applied response is dropped; one connection remains."""
    made, poller, _ = polling
    await until(lambda: made.woken == 1)
    poller.receive(0.0)
    poller.cut()
    assert (poller.receive(0.0), made.hidden) == (False, 1)
    await until(lambda: made.woken == 2)
    await until(lambda: made.entered)
    await asyncio.sleep(0.1)

    assert made.questions == 2
