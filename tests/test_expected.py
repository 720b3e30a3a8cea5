"""Pages made before they are asked for: when the next scrape is due, and what it finds."""

from __future__ import annotations

import asyncio
import time

import pytest

from harm import World
from sidestep.serving.expected import EVEN, LONGEST, SHORTEST, Expected
from sidestep.serving.scrapes import CHEAP, REUSED, Pages
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
        ((15.0,), None),
        ((15.0, 15.0), 145.0),
        ((15.0, 15.0 * (1 - EVEN / 2)), 100 + 15 + 2 * 14.25),
        ((15.0, 15.0 * (1 - 2 * EVEN)), None),
        ((15.0, 3.0, 15.0), None),
        ((3.0, 15.0, 15.0), 148.0),
        ((SHORTEST / 2, SHORTEST / 2), None),
        ((2 * LONGEST, 2 * LONGEST), None),
    ],
)
def test_two_even_intervals_promise_a_third(
    intervals: tuple[float, ...], due: float | None
) -> None:
    """Neither routers' nor those of somebody who looks now and then."""
    assert expected(*intervals).at == (None if due is None else pytest.approx(due))


async def test_a_page_that_is_due_is_made_before_it_is_asked_for() -> None:
    """All engines have changed since the last one; who asks then waits for next to nothing."""
    world = World()
    registry = world.intake.registry
    for number in range(200):
        registry.register(
            EngineInfo(str(number), "vllm", {"engine": str(number), "model_name": "m"})
        )
    pages = Pages(registry, world.own, world.intake.metrics, [])
    spent: list[int] = []
    for is_due in (False, False, True):
        for one in registry.engines.values():
            for histogram in one.histograms:
                if histogram is not None:
                    histogram.observe(1.0)
            registry.touch(one)
        if is_due:
            pages._expected["text"] = regular = Expected()
            for ago in (2.9, 1.9, 0.9):
                regular.asked(time.monotonic() - ago)
            pages._took["text"] = 2 * CHEAP
            pages._anticipate("text")
            async with asyncio.timeout(60):
                while pages._state not in [state for state, _ in pages._cache.values()]:
                    await asyncio.sleep(0.01)
        await asyncio.sleep(REUSED)
        with counted() as calls:
            page = b"".join(await pages.page("text", frozenset()))
        spent.append(calls.count)

    assert spent[2] < spent[1] / 3
    assert b'vllm:request_params_n_count{engine="199",model_name="m"} 3\n' in page


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
        # What is done when a page is there has its turn after whoever waited.
        await asyncio.sleep(0)
        waiting.append(pages._ahead["text"])

    assert [one.cancelled() for one in waiting] == [True, True, False]
    waiting[-1].cancel()
