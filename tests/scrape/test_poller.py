"""When a target is asked, and what becomes of its answers, in slices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from conftest import until
from sidestep.config.scrape_targets import parse
from sidestep.errors import PollError
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep_adapters.scrape.poller import Poller, PollQuery

NAME = "http://h/metrics"
PREFIX = "sidestep_scrape_"


class Asked:
    """A target that answers with numbers, and what is done with them.

    Attributes:
        failing: Raised instead of an answer.
        entered: Whether questions can be asked.
        taken: Slices of answers that were worked off.
    """

    def __init__(self) -> None:
        self.questions = 0
        self.failing: Exception | None = None
        self.entered = False
        self.taken: list[int] = []
        self.hidden = 0
        self.woken = 0

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Callable[[], Awaitable[int]]]:
        """Ask from now on."""
        self.entered = True
        try:
            yield self.ask
        finally:
            self.entered = False

    async def ask(self) -> int:
        """One question."""
        self.questions += 1
        await asyncio.sleep(0)
        if self.failing is not None:
            raise self.failing
        return self.questions

    def take(self, answer: int) -> Iterator[None]:
        """Three slices; a negative one is none."""
        for _ in range(3):
            self.taken.append(answer)
            yield
        if answer == 2:
            raise PollError("bad_answer", "two")

    def hide(self) -> None:
        """Nothing is shown."""
        self.hidden += 1

    def wake(self) -> None:
        """There is something."""
        self.woken += 1


@pytest.fixture
async def asked() -> AsyncIterator[tuple[Asked, Poller[int], SelfMetrics]]:
    """A target and who polls it, as often as it goes."""
    made, metrics = Asked(), SelfMetrics()
    question = PollQuery(made.connect, made.take, made.hide)
    poller = Poller(parse(f"{NAME},interval=0.05"), question, metrics, PREFIX)
    poller.open(made.wake)
    yield made, poller, metrics
    poller.close()
    await until(lambda: not made.entered)


async def test_the_next_question_waits_for_the_loops_turns(
    asked: tuple[Asked, Poller[int], SelfMetrics],
) -> None:
    """An answer is worked off a slice at each turn; until then nobody asks."""
    made, poller, metrics = asked
    await until(lambda: made.woken == 1)
    await asyncio.sleep(0.2)
    assert (made.questions, made.taken) == (1, [])
    assert not poller.state.is_shown
    assert [poller.receive(0.0) for _ in range(5)] == [True, True, True, False, False]
    assert made.taken == [1, 1, 1]
    assert poller.state.state == "up"
    await until(lambda: made.woken == 2)

    assert metrics.value(f"{PREFIX}polls_total", NAME, "ok") == 1


async def test_an_answer_that_turns_out_to_be_none(
    asked: tuple[Asked, Poller[int], SelfMetrics],
) -> None:
    """Fails where it is worked off; the next one may be one."""
    made, poller, metrics = asked
    for number in (1, 2, 3):
        await until(lambda number=number: made.woken == number)  # type: ignore[misc]
        while poller.receive(0.0):
            pass
        assert made.hidden == (number > 1)
        assert poller.state.state == ("down" if number == 2 else "up")

    assert metrics.value(f"{PREFIX}polls_total", NAME, "bad_answer") == 1


async def test_what_is_not_answered_for_long_is_hidden(
    asked: tuple[Asked, Poller[int], SelfMetrics],
) -> None:
    """Once, by the clock that passes; slow answers alone do not."""
    made, poller, _ = asked
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


async def test_cut_begins_anew(asked: tuple[Asked, Poller[int], SelfMetrics]) -> None:
    """What was half worked off is gone; there is one who asks."""
    made, poller, _ = asked
    await until(lambda: made.woken == 1)
    poller.receive(0.0)
    poller.cut()
    assert (poller.receive(0.0), made.hidden) == (False, 1)
    await until(lambda: made.woken == 2)
    await until(lambda: made.entered)
    await asyncio.sleep(0.1)

    assert made.questions == 2
