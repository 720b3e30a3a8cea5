"""Pages made before they are asked for: when the next scrape is due, and what it finds."""

from __future__ import annotations

import asyncio
import gzip
import time

import pytest

from harm import World
from sidestep.serving.expected import EVEN, LONGEST, MANY, SHORTEST, Expected
from sidestep.serving.scrapes import CHEAP, JITTER, Pages
from sidestep.wire.messages import EngineInfo
from slices import counted


def expected(*intervals: float) -> Expected:
    """Of somebody who asked at 100 s, and then after each of ``intervals``."""
    found, now = Expected(), 100.0
    found.asked(now)
    for interval in intervals:
        now += interval
        found.asked(now)
    return found


@pytest.mark.parametrize(
    ("intervals", "due"),
    [
        ((), None),
        ((15.0,), 130.0),
        ((15.0, 15.0), 145.0),
        ((15.0, 15.0 * (1 - EVEN / 2)), 100 + 15 + 2 * 14.25),
        ((15.0, 15.0 * (1 - 2 * EVEN)), None),
        ((15.0, 3.0, 15.0), None),
        ((3.0, 15.0, 15.0), 148.0),
        ((SHORTEST / 2,), None),
        ((SHORTEST / 2, SHORTEST / 2), None),
        ((2 * LONGEST, 2 * LONGEST), None),
    ],
)
def test_two_even_intervals_promise_a_third(
    intervals: tuple[float, ...], due: float | None
) -> None:
    """And the first one a second: neither routers' nor those of somebody who looks now and then."""
    assert expected(*intervals).at == (None if due is None else pytest.approx(due))


@pytest.mark.parametrize(
    ("offsets", "many"), [((0.0, 4.0), 2), ((0.0, 0.05), 2), ((0.0, 2.0, 9.0), MANY)]
)
def test_who_ask_by_turns_are_told_apart(offsets: tuple[float, ...], many: int) -> None:
    """A pair of Prometheus servers asks at the same intervals, each in its own time."""
    found = Expected()
    asks = [15.0 * turn + offset for turn in range(4) for offset in offsets]
    for now in asks[:-many]:
        found.asked(now)
    for now, after in zip(asks[-many:], [*asks[1 - many :], asks[-many] + 15.0], strict=True):
        found.asked(now)
        assert found.at == pytest.approx(after)


class Ahead:
    """A page of many engines, that somebody regular asks for."""

    def __init__(self) -> None:
        self.world = World()
        self.registry = self.world.intake.registry
        for number in range(200):
            labels = {"engine": str(number), "model_name": "m"}
            self.registry.register(EngineInfo(str(number), "vllm", labels))
        self.pages = Pages(self.registry, self.world.own, self.world.intake.metrics, [])

    def observe(self) -> None:
        """All engines have something new."""
        for one in self.registry.engines.values():
            for histogram in one.histograms:
                if histogram is not None:
                    histogram.observe(1.0)
            self.registry.touch(one)

    async def ask(self, *, packed: bool = False) -> tuple[bytes, int]:
        """The page, and how many calls it took."""
        with counted() as calls:
            parts = await self.pages.page("text", frozenset(), packed=packed)
        return b"".join(parts), calls.count

    def shows(self, page: bytes, count: int) -> bool:
        """Whether each histogram has so many observations."""
        return f'n_count{{engine="199",model_name="m"}} {count}\n'.encode() in page


def regular(intervals: float) -> Expected:
    """Who has asked every second, the last time before ``intervals`` of them."""
    found = Expected()
    for ago in (2, 1, 0):
        found.asked(time.monotonic() - ago - intervals)
    return found


@pytest.mark.parametrize("packed", [False, True])
async def test_a_page_that_is_due_is_made_before_it_is_asked_for(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in gzip. Who asks then finds it, and who asks much later what is new."""
    monkeypatch.setattr("sidestep.serving.scrapes.REUSED", 0.0)
    made = Ahead()
    made.observe()
    _, spent = await made.ask(packed=packed)
    made.observe()
    made.pages._expected["text"] = regular(0.7)
    made.pages._took["text"] = 2 * CHEAP
    made.pages._anticipate("text", packed=packed)
    async with asyncio.timeout(60):
        while not made.pages._making:
            await asyncio.sleep(0.005)
        # Half done: who asks now waits for the same one.
        early, _ = await made.ask(packed=packed)
        while made.pages._making:
            await asyncio.sleep(0.005)
    made.observe()

    due, found = await made.ask(packed=packed)

    assert due == early
    text = gzip.decompress(due) if packed else due
    assert made.shows(text, 2)
    assert found < spent / 10
    await asyncio.sleep(0.3 + 2 * JITTER)
    late, _ = await made.ask()
    assert made.shows(late, 3)


async def test_who_asks_early_is_not_waited_for_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each page that is asked for out of turn would have another one made for nobody."""
    monkeypatch.setattr("sidestep.serving.scrapes.CHEAP", -1.0)
    monkeypatch.setattr("sidestep.serving.scrapes.REUSED", 0.0)
    monkeypatch.setattr(Expected, "at", property(lambda _: time.monotonic() + 60.0))
    world = World()
    pages = Pages(world.intake.registry, world.own, world.intake.metrics, [])
    waiting = []
    for _ in range(3):
        await pages.page("text", frozenset())
        waiting.append(pages._ahead["text"])

    assert [one.cancelled() for one in waiting] == [True, True, False]
    waiting[-1].cancel()


async def test_a_page_that_could_not_be_made_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its failure is that of who asked, and nobody's who asks later, however long it took to fail."""
    monkeypatch.setattr("sidestep.serving.scrapes.CHEAP", -1.0)
    made = Ahead()
    made.observe()
    with monkeypatch.context() as broken:
        broken.setattr(made.pages, "_own", None)
        with pytest.raises(AttributeError):
            await made.ask()
    assert made.shows((await made.ask())[0], 1)
