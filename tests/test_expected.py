"""Pages made before they are asked for: when the next scrape is due, and what it finds."""

from __future__ import annotations

import asyncio
import gzip
import math
import random
import threading
import time
from itertools import accumulate
from typing import Any

import pytest

from harm import World
from sidestep.exposition.compression import SHORT, Packed, pack
from sidestep.exposition.expected import FEW, JITTER, LONGEST, MANY, SHORTEST, USUAL, Due, Expected
from sidestep.exposition.negotiation import Format
from sidestep.exposition.page_cache import CHEAP, REUSED, Answer, Pages
from sidestep.protocol.messages import EngineInfo
from slices import counted


def asked(*times: float) -> list[object]:
    """When who asked at each of ``times`` is due again, as far as that is known."""
    found = Expected()
    dues = [known(found.asked(now)) for now in times]
    return [due and pytest.approx(due.at, abs=JITTER / 2) for due in dues]


def known(dues: list[Due]) -> Due | None:
    """The one that is not guessed; guesses are all of the usual intervals."""
    return dues[0] if len(dues) % len(USUAL) else None


@pytest.mark.parametrize(
    ("intervals", "due"),
    [
        ((), None),
        ((15.0,), 130.0),
        ((15.0, 15.0), 145.0),
        ((15.0, 15.0 + 2 * JITTER), None),
        ((15.0, 3.0, 15.0), 148.0),
        ((15.0, 3.0, 16.0), None),
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
    dues = [known(found.asked(now + draw.uniform(-0.005, 0.005))) for now in times]

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


@pytest.mark.parametrize("interval", USUAL)
@pytest.mark.parametrize("before", [(), (0.3,), (0.3, 2.7)])
def test_usual_intervals_are_guessed(interval: float, before: tuple[float, ...]) -> None:
    """So that the second scrape finds its page, whoever looked before; then it is known."""
    found = Expected()
    for now in before:
        assert len(found.asked(now)) >= len(USUAL)
    first = 4.0
    guesses = found.asked(first)[-len(USUAL) :]
    assert first + interval in [due.at for due in guesses]
    for due in guesses:
        assert found.expects(due)

    second = found.asked(first + interval + JITTER / 2)

    assert [due.at for due in second] == [pytest.approx(first + 2 * interval, abs=JITTER)]
    assert found.expects(second[0])
    assert not any(found.expects(due) for due in guesses)


def test_guesses_are_few() -> None:
    """Who comes now and then does not have pages made in vain for ever."""
    draw = random.Random(3)
    often = Expected()
    times = accumulate(draw.expovariate(0.01) for _ in range(1000))
    guesses = [dues for dues in map(often.asked, times) if len(dues) >= len(USUAL)]
    assert len(guesses) == FEW


def test_a_pair_is_guessed() -> None:
    """Two at the same interval: each finds its second page, whoever comes first."""
    found = Expected()
    times = [15.0 * turn + offset for turn in range(4) for offset in (0.0, 7.0)]
    for place, now in enumerate(times):
        if place > 1:
            expected = [due.at for due in (*found._due, *found._guessed)]
            assert any(abs(at - now) <= JITTER for at in expected)
        found.asked(now)


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

    def expected(self, seconds: float, *, packed: bool = False) -> Due:
        """Somebody who is expected to ask in so many seconds."""
        due = Due(time.monotonic(), seconds)
        self.pages._expected["text", packed]._due.append(due)
        return due

    async def due(self, seconds: float, *, packed: bool = False) -> None:
        """Somebody will ask in so many seconds; return when the page for that is begun."""
        due = self.expected(seconds, packed=packed)
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


async def test_the_second_page_is_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of the usual intervals, until one of them has proved right."""
    monkeypatch.setattr("sidestep.exposition.expected.USUAL", (0.5, 1.0, 1.7))
    # However well it is known how long they take.
    monkeypatch.setattr("sidestep.exposition.page_cache.REUSED", 0.6)
    monkeypatch.setattr("sidestep.exposition.page_cache.CHEAP", -1.0)
    made = Ahead()
    new: list[float] = []
    begun = time.monotonic()

    def counting(form: Format) -> Answer:
        new.append(time.monotonic() - begun)
        return one(form)

    one = made.pages._new
    monkeypatch.setattr(made.pages, "_new", counting)
    # Not counted: that would take a multiple of the time.
    await made.pages.page("text", frozenset())
    made.observe()
    await asyncio.sleep(begun + 1.0 - time.monotonic())
    page, _ = await made.ask()

    assert made.shows(page, 1)
    # That page, and one at half a second, which nobody has taken.
    assert len(new) == 3
    assert new[-1] < 0.999
    await asyncio.sleep(begun + 1.9 - time.monotonic())
    # The next one is due after two seconds, and nobody is expected after 1.7.
    assert [at for at in new if 1.05 < at < 1.75] == []


async def test_a_page_made_ahead_is_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However new the last one is: else one page could be kept for ever."""
    monkeypatch.setattr("sidestep.exposition.page_cache.REUSED", 60.0)
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
    made.pages._begin("text", made.expected(0.0, packed=packed), packed=packed)
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
    monkeypatch.setattr("sidestep.exposition.page_cache.CHEAP", -1.0)
    late = math.inf
    # On a busy machine nobody is as regular as that.
    for _ in range(20):
        if late < JITTER / 4:
            break
        made = Ahead()
        ahead: list[tuple[Due, bool]] = []
        monkeypatch.setattr(
            made.pages,
            "_anticipate",
            lambda _, due, *, packed, to=ahead: to.append((due, packed)),
        )
        begun = time.monotonic()
        late = 0.0
        for turn in range(8):
            at = begun + 0.25 * turn
            await asyncio.sleep(max(at - time.monotonic(), 0.0))
            late = max(late, time.monotonic() - at)
            await made.ask(packed=turn % 2 == 1)

    assert late < JITTER / 4
    known = [(due.at, packed) for due, packed in ahead if due.interval < min(USUAL)]
    assert [packed for _, packed in known].count(True) == len(known) / 2 == 3
    assert [round((at - begun) / 0.25) % 2 == 1 for at, _ in known] == [one for _, one in known]


async def test_one_page_is_in_the_making_for_all_who_are_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two at one time, and who asks while it is packed, however long that takes."""
    monkeypatch.setattr("sidestep.exposition.page_cache.REUSED", 0.0)
    packing = asyncio.Event()
    go_on = asyncio.Event()

    async def slowly(*given: Any, **named: Any) -> Packed:
        packing.set()
        await go_on.wait()
        return await pack(*given, **named)

    monkeypatch.setattr("sidestep.exposition.compression.pack", slowly)
    made = Ahead()
    made.observe()
    for packed in (True, False):
        made.pages._begin("text", made.expected(1.0, packed=packed), packed=packed)
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
    monkeypatch.setattr("sidestep.exposition.page_cache.CHEAP", -1.0)
    made = Ahead()
    made.observe()
    with monkeypatch.context() as broken:
        broken.setattr(made.pages, "_own", None)
        with pytest.raises(AttributeError):
            await made.ask()
    assert made.shows((await made.ask())[0], 1)


async def test_what_is_short_is_packed_without_a_thread() -> None:
    """To wake one up takes longer."""
    before = threading.active_count()
    await pack([b"x" * SHORT])
    assert threading.active_count() == before
    await pack([b"x" * SHORT, b"x"])
    assert threading.active_count() == before + 1
