"""Pages made before they are asked for: when the next scrape is due, and what it finds."""

from __future__ import annotations

import asyncio
import gzip
import random
import time
from itertools import accumulate
from typing import Any

import pytest

from harm import World
from sidestep.serving.expected import JITTER, LONGEST, MANY, SHORTEST, Expected
from sidestep.serving.packing import Packed, pack
from sidestep.serving.scrapes import CHEAP, REUSED, Pages
from sidestep.wire.messages import EngineInfo
from slices import counted


def asked(*times: float) -> list[object]:
    """When who asked at each of ``times`` is due again, as far as that is known."""
    found = Expected()
    dues = [found.asked(now) for now in times]
    return [due and pytest.approx(due.at, abs=JITTER / 2) for due in dues]


@pytest.mark.parametrize(
    ("intervals", "due"),
    [
        ((), None),
        ((15.0,), 130.0),
        ((15.0, 15.0), 145.0),
        ((15.0, 15.0 + 2 * JITTER), None),
        ((15.0, 3.0, 15.0), None),
        ((3.0, 15.0, 15.0), 148.0),
        ((SHORTEST / 2,), None),
        ((SHORTEST / 3,) * 6, None),
        ((2 * LONGEST, 2 * LONGEST), None),
    ],
)
def test_two_even_intervals_promise_a_third(
    intervals: tuple[float, ...], due: float | None
) -> None:
    """And the first one a second: neither routers' nor those of somebody who looks now and then."""
    assert asked(*accumulate(intervals, initial=100.0))[-1] == due


@pytest.mark.parametrize(
    "offsets", [(0.0,), (0.0, 4.0), (0.0, JITTER / 2), (0.0, 2.0, 9.0), (0.0, 2.0, 5.0, 9.0)]
)
def test_who_ask_by_turns_are_told_apart(offsets: tuple[float, ...]) -> None:
    """A pair of Prometheus servers asks at the same intervals, each in its own time; few are enough."""
    times = [15.0 * turn + offset for turn in range(6) for offset in offsets]
    known = [now for now, due in zip(times, asked(*times), strict=True) if due == now + 15.0]

    late = [now for now in times if now >= 45.0]
    assert len([now for now in known if now in late]) == 3 * min(len(offsets), MANY)


def test_who_looks_in_between_disturbs_nobody() -> None:
    """Nor does somebody who was expected and has not come; and chance is not often believed."""
    times = [0.0, 15.0, 30.0, 37.0, 45.0, 60.0, 63.0, 75.0, 120.0, 135.0, 150.0]
    dues = dict(zip(times, asked(*times), strict=True))
    assert [now for now, due in dues.items() if due == now + 15.0] == [
        15.0, 30.0, 45.0, 60.0, 75.0, 150.0
    ]  # fmt: skip
    assert {dues[now] for now in (37.0, 63.0, 120.0)} == {None}

    draw = random.Random(1)
    chance = asked(*accumulate(draw.expovariate(0.1) for _ in range(1000)))
    assert sum(due is not None for due in chance) < 60


@pytest.mark.parametrize(("interval", "before"), [(15.0, 60.0), (LONGEST, LONGEST)])
def test_scrapes_that_are_lost_are_not_for_ever(interval: float, before: float) -> None:
    """One in fifty, after an hour of another interval, all of them to 5 ms."""
    draw = random.Random(2)
    times = [before * turn for turn in range(60)]
    times += [times[-1] + interval * turn for turn in range(1, 2000) if draw.random() > 0.02]
    found = Expected()
    dues = [found.asked(now + draw.uniform(-0.005, 0.005)) for now in times]

    hits = [
        due is not None and abs(due.at - now) <= JITTER
        for due, now in zip(dues, times[1:], strict=False)
    ]
    assert sum(hits[60:]) > 0.85 * len(hits[60:])
    assert len(found._due) <= MANY


def test_intervals_that_drift_are_followed() -> None:
    """A hundredth of a second more each time."""
    times = [*accumulate((15.0 + 0.01 * turn for turn in range(50)), initial=0.0)]

    assert None not in asked(*times)[1:]


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

    async def due(self, seconds: float, *, packed: bool = False) -> None:
        """Somebody will ask in so many seconds; return when the page for that is begun."""
        due = time.monotonic() + seconds
        self.pages._took["text", packed] = max(self.pages._took["text", packed], 2 * CHEAP)
        self.pages._anticipate("text", due, packed=packed)
        async with asyncio.timeout(60):
            while not self.pages._making:
                await asyncio.sleep(0.005)

    async def ready(self) -> None:
        """Return when no page is made ahead any more."""
        async with asyncio.timeout(60):
            while self.pages._making:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("packed", [False, True])
async def test_a_page_that_is_due_is_made_before_it_is_asked_for(
    packed: bool,
) -> None:
    """Also in gzip. Who asks then finds it, and who asks much later what is new."""
    made = Ahead()
    made.observe()
    _, spent = await made.ask(packed=packed)
    await asyncio.sleep(REUSED)
    made.observe()
    await made.due(1.0, packed=packed)
    # Half done: who asks now waits for the same one.
    early, _ = await made.ask(packed=packed)
    await made.ready()
    made.observe()

    due, found = await made.ask(packed=packed)

    assert due == early
    assert made.shows(gzip.decompress(due) if packed else due, 2)
    assert found < spent / 10
    await asyncio.sleep(REUSED + JITTER)
    late, _ = await made.ask()
    assert made.shows(late, 3)


async def test_a_page_made_ahead_is_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However new the last one is: else one page could be kept for ever."""
    monkeypatch.setattr("sidestep.serving.scrapes.REUSED", 60.0)
    made = Ahead()
    await made.ask()
    for count in range(1, 4):
        made.observe()
        await made.due(1.0)
        await made.ready()
        assert made.shows((await made.ask())[0], count)


@pytest.mark.parametrize("packed", [False, True])
async def test_a_page_that_was_made_at_once_is_not_kept_for_ever(packed: bool) -> None:
    """Where nothing has changed there is nothing to wait for."""
    made = Ahead()
    made.observe()
    await made.ask(packed=packed)
    made.pages._begin("text", time.monotonic(), packed=packed)
    await made.ready()
    made.observe()
    await asyncio.sleep(REUSED + JITTER)

    assert made.shows((await made.ask())[0], 2)


async def test_a_page_is_not_kept_longer_for_who_does_not_come() -> None:
    """The one after a page that took long is begun early, and may be there long before it is due."""
    made = Ahead()
    made.observe()
    await made.ask()
    made.observe()
    made.pages._took["text", False] = 0.6
    await made.due(1.0)
    await made.ready()
    made.observe()
    await asyncio.sleep(REUSED)

    assert made.shows((await made.ask())[0], 3)


async def test_who_asks_for_gzip_by_turns_gets_it_made_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the other's page is not packed."""
    monkeypatch.setattr("sidestep.serving.scrapes.CHEAP", -1.0)
    made = Ahead()
    ahead: list[tuple[float, bool]] = []
    monkeypatch.setattr(
        made.pages, "_anticipate", lambda _, due, *, packed: ahead.append((due, packed))
    )
    begun = time.monotonic()
    for turn in range(8):
        await asyncio.sleep(max(begun + 0.25 * turn - time.monotonic(), 0.0))
        await made.ask(packed=turn % 2 == 1)

    assert {
        packed: len([one for one in ahead if one[1] == packed]) for packed in (False, True)
    } == {
        False: 3,
        True: 3,
    }
    assert [round((due - begun) / 0.25) % 2 == 1 for due, _ in ahead] == [one for _, one in ahead]


async def test_one_page_is_in_the_making_for_all_who_are_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two at one time, and who asks while it is packed, however long that takes."""
    monkeypatch.setattr("sidestep.serving.scrapes.REUSED", 0.0)
    packing = asyncio.Event()
    go_on = asyncio.Event()

    async def slowly(*given: Any, **named: Any) -> Packed:
        packing.set()
        await go_on.wait()
        return await pack(*given, **named)

    monkeypatch.setattr("sidestep.serving.packing.pack", slowly)
    made = Ahead()
    made.observe()
    due = time.monotonic() + 1.0
    made.pages._begin("text", due, packed=True)
    made.pages._begin("text", due, packed=False)
    assert len(made.pages._making) == 1
    await packing.wait()
    made.observe()
    page, _ = await made.ask()
    go_on.set()
    await made.ready()

    assert made.shows(page, 1)
    assert gzip.decompress((await made.ask(packed=True))[0]) == page


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
