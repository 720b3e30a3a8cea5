"""Pages in the making: each state once for all who ask at one time, and kept, also in gzip."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from itertools import chain
from typing import Protocol

from sidestep.exposition import passthrough_text as passed
from sidestep.exposition import protobuf_page as protobuf
from sidestep.exposition import protobuf_samples
from sidestep.exposition.aggregated_text import Merged
from sidestep.exposition.compression import Body
from sidestep.exposition.expected import JITTER, Due, Expected
from sidestep.exposition.negotiation import Format
from sidestep.exposition.own_families import OwnTexts
from sidestep.exposition.pod_page_cache import PodPages
from sidestep.exposition.series_filter import Choice
from sidestep.exposition.text_page import Texts
from sidestep.metrics.registry import Registry
from sidestep.telemetry.cooperative import collected
from sidestep.telemetry.self_metrics import OwnRegistry, SelfMetrics

CHEAP = 0.005
"""Seconds that a page may take to be made anew for each who asks."""
REUSED = 0.1
"""Seconds for which a page may answer more than those who asked for it, or half of what it took
where it was made ahead."""
AHEAD = 1.2
"""Times that it takes to make a page, before one is due, is when it is made ahead."""
WARM = 0.3
"""What the second page takes of what the first one took, about: 28 of 98 ms with 256 engines."""

State = tuple[int, int]
"""Another one when the page is another."""


class Answer:
    """A page in the making, or made, for all who ask until it is too old.

    Attributes:
        begun: When its making began, monotonic seconds.
        until: When it is too old; infinite while it is in the making.
    """

    def __init__(self, make: Callable[[], Awaitable[Body]]) -> None:
        self.begun = time.monotonic()
        self.until = math.inf
        self._task = asyncio.create_task(self._kept(make))
        # Somebody may have asked for it, and gone.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _kept(self, make: Callable[[], Awaitable[Body]]) -> Body:
        """The page; who has it knows until when it is kept, and who does not that it is not."""
        kept = 0.0
        try:
            body = await make()
            took = time.monotonic() - self.begun
            kept = min(9 * took, REUSED) if took > CHEAP else 0.0
        finally:
            self.until = time.monotonic() + kept
        return body

    async def parts(self, *, packed: bool) -> Sequence[bytes]:
        """The page, or the page in gzip; one who hangs up does not take it from others."""
        return await _parts(await asyncio.shield(self._task), packed=packed)


class Durable(Protocol):
    """What makes outlive the process what a page shows."""

    async def settled(self) -> None:
        """Return once a snapshot has all that was applied before this call."""


class Pages:
    """Renders pages, each state of the registry once, for all who ask at one time.

    Args:
        snapshots: Where given, nobody sees a page before what it shows is safe: a counter
            that was seen never goes back when this process dies.
        choice: What of the engines' series pages show.
    """

    def __init__(
        self,
        registry: Registry,
        own: OwnRegistry,
        metrics: SelfMetrics,
        endpoints: list[str],
        snapshots: Durable | None = None,
        *,
        choice: Choice | None = None,
    ) -> None:
        shown = choice or Choice()
        self.registry = registry
        self.metrics = metrics
        self.endpoints = endpoints
        self._own = OwnTexts(own)
        self._snapshots = snapshots
        self.views = {"engine": Merged(registry, shown), "pod": Merged(registry, shown.of_pod)}
        # What labels and bounds are left away is text's alone.
        self.has_protobuf = shown.is_plain and registry.native is not None
        self._texts = Texts(registry) if shown.is_plain else self.views["engine"]
        self.pod = PodPages(registry, self.views["pod"], self._own, self.settled)
        self._cache: dict[Format, tuple[State, Body]] = {}
        self._answers: dict[Format, Answer] = {}
        self._expected: defaultdict[tuple[Format, bool], Expected] = defaultdict(Expected)
        self._took: defaultdict[tuple[Format, bool], float] = defaultdict(float)
        """Seconds from the beginning of the last new page until it was there, in gzip or not."""
        self._making: set[asyncio.Task[None]] = set()

    async def page(
        self, form: Format, names: frozenset[str], *, packed: bool = False
    ) -> Sequence[bytes]:
        """The parts of the whole page, or of its gzip where it is to be ``packed``.

        The engines' families come first, then those passed on, then the exporter's own.
        One page is in the making at a time and answers all who ask meanwhile, and for
        a little longer where it was dear: however many ask, there is time for engines.
        """
        if names:
            return await _parts(await self._made(form, names), packed=packed)
        now = time.monotonic()
        dues = self._expected[form, packed].asked(now)
        try:
            answer = self._answers.get(form)
            if answer is not None and now < answer.until:
                return await answer.parts(packed=packed)
            # Under the same name: the one before is not to be held while this one is made.
            answer = self._new(form)
            return await self._timed(form, answer, packed=packed)
        finally:
            # Now it is known how long it takes.
            for due in dues:
                self._anticipate(form, due, packed=packed)

    def _new(self, form: Format) -> Answer:
        now = time.monotonic()
        self._answers = {one: kept for one, kept in self._answers.items() if now < kept.until}
        answer = self._answers[form] = Answer(functools.partial(self._made, form))
        return answer

    async def _timed(self, form: Format, answer: Answer, *, packed: bool) -> Sequence[bytes]:
        parts = await answer.parts(packed=packed)
        took = time.monotonic() - answer.begun
        self._took[form, packed] = took if self._took[form, packed] else WARM * took
        return parts

    def _anticipate(self, form: Format, due: Due, *, packed: bool) -> None:
        """Make the page shortly before it is due: who asks then finds it there."""
        took = self._took[form, packed]
        delay = due.at - AHEAD * took - JITTER - time.monotonic()
        if took > CHEAP and delay > 0:
            begin = functools.partial(self._begin, form, due, packed=packed)
            asyncio.get_running_loop().call_later(delay, begin)

    def _begin(self, form: Format, due: Due, *, packed: bool) -> None:
        present = self._answers.get(form)
        # Who is due finds the one that is in the making already.
        is_free = present is None or present.until < math.inf
        if is_free and self._expected[form, packed].expects(due):
            ahead = self._make_ahead(form, self._new(form), due.at, packed=packed)
            task = asyncio.get_running_loop().create_task(ahead)
            self._making.add(task)
            task.add_done_callback(self._making.discard)

    async def _make_ahead(self, form: Format, answer: Answer, due: float, *, packed: bool) -> None:
        # What is wrong with a page is for who asks for it.
        with contextlib.suppress(Exception):
            await answer.parts(packed=False)
            # Who comes while it is packed is to wait for that, and not for another one.
            until, answer.until = answer.until, math.inf
            try:
                await self._timed(form, answer, packed=packed)
            finally:
                answer.until = until
            # What took longer may have been begun the earlier in vain.
            kept = max(REUSED, self._took[form, packed] / 2)
            answer.until = max(until, min(due + JITTER, time.monotonic() + kept))

    async def _made(self, form: Format, names: Collection[str] = ()) -> Body:
        started = time.perf_counter()
        engines = Body(await self._rendered(form, names)) if names else await self._engines(form)
        own = await collected(self._own.pieces(form, names))
        await self.settled()
        self.metrics.set("sidestep_scrape_duration_seconds", time.perf_counter() - started)
        return Body([b"".join(own)], engines)

    async def settled(self) -> None:
        """Return when what was rendered before the call may be seen."""
        if self._snapshots is not None:
            await self._snapshots.settled()

    async def _engines(self, form: Format) -> Body:
        state = self._state
        # What is past would hold a whole page of texts while the next one is made.
        self._cache = {one: kept for one, kept in self._cache.items() if kept[0] == state}
        if form not in self._cache:
            self._cache[form] = state, Body(await self._rendered(form))
        return self._cache[form][1]

    @property
    def _state(self) -> State:
        return self.registry.version, self.registry.passed.version

    async def _rendered(self, form: Format, names: Collection[str] = ()) -> list[bytes]:
        """The engines' families and those passed on; the loop gets its turn when it is due.

        Each family is of one moment. What comes meanwhile is in the later ones, and the
        snapshot that a page waits for is made afterwards.
        """
        return [*chain.from_iterable(await collected(self._pieces(form, names)))]

    def _pieces(self, form: Format, names: Collection[str]) -> Iterator[list[bytes]]:
        if form == "protobuf":
            others = protobuf_samples.passed_pieces(self.registry.passed, names)
            return chain(protobuf.pieces(self.registry, names), others)
        openmetrics = form == "openmetrics"
        others = passed.pieces(self.registry.passed, openmetrics=openmetrics, names=names)
        return chain(self._texts.pieces(openmetrics=openmetrics, names=names), others)


async def _parts(body: Body, *, packed: bool) -> Sequence[bytes]:
    return (await body.packed()).parts if packed else body.parts
