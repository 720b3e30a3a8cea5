"""The pod's page: made once for all the routers that poll it, and kept in their compression.

Request routers ask every 50 ms, each of their replicas for itself. However many ask, making
the page takes a bounded share of one core. They look at gauges: those are always of the page's
moment, while histograms, which are most of it, are made less often.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

from sidestep.exposition import passthrough_text as passed
from sidestep.exposition.aggregated_text import Merged
from sidestep.exposition.compression import Body
from sidestep.exposition.families import forms
from sidestep.exposition.negotiation import Format
from sidestep.exposition.own_families import OwnTexts
from sidestep.metrics.registry import Registry
from sidestep.telemetry.cooperative import collected

SHARE = 100
"""A page is kept for so many times as long as it took to make: 1 % of a core, but for LONGEST."""
LONGEST = 0.1
"""Seconds that a page is kept at most while it changes."""
OBSERVED = 0.5
"""Seconds for which histograms and summaries may be kept."""
OWN = 1.0
"""Seconds for which the exporter's own part of it may be kept."""
State = tuple[int, int]
Item = TypeVar("Item")


class Part(NamedTuple):
    """Families that are made less often than others.

    Attributes:
        state: Of the registry, which they show.
        until: When they are too old, monotonic.
        forms: What there was of families then.
    """

    state: State
    until: float
    text: bytes
    forms: object


class Page:
    """One page in the making, or made.

    Attributes:
        state: What of the registry is on it, at least.
        until: When it is too old, monotonic.
    """

    def __init__(self, state: State, made: Awaitable[Body]) -> None:
        self.state = state
        self.until = math.inf
        self._at = self._spent = 0.0
        self._is_packed = False
        self._made = asyncio.ensure_future(made)

    def spend(self, seconds: float) -> None:
        """It is there, and took so much time more: it is kept the longer."""
        self._at = self._at or time.monotonic()
        self._spent += seconds
        self.until = self._at + min(SHARE * self._spent, LONGEST)

    @property
    def failed(self) -> bool:
        """Whether it could not be made."""
        task = self._made
        return task.done() and (task.cancelled() or task.exception() is not None)

    async def parts(self, *, packed: bool) -> Sequence[bytes]:
        """The page, or the page in gzip; one who hangs up does not take it from others."""
        body = await asyncio.shield(self._made)
        if not packed:
            return body.parts
        found = await body.packed()
        if not self._is_packed:
            self._is_packed = True
            self.spend(found.spent)
        return found.parts


class PodPages:
    """The pages on which a pod's engines are one.

    Args:
        own: The exporter's own families.
        settled: Returns when what was rendered before the call may be seen.
    """

    def __init__(
        self,
        registry: Registry,
        merged: Merged,
        own: OwnTexts,
        settled: Callable[[], Awaitable[None]],
    ) -> None:
        self._registry = registry
        self._merged = merged
        self._own = own
        self._settled = settled
        self._pages: dict[bool, Page] = {}
        self._observed: dict[bool, Part] = {}
        self._own_parts: dict[bool, Part] = {}

    def page(self, *, openmetrics: bool, names: frozenset[str]) -> Page:
        """The whole page, or that of some ``names``: another one where the last is too old."""
        if names:
            return Page(self._state, self._some(openmetrics=openmetrics, names=names))
        page = self._pages.get(openmetrics)
        if page is None or page.failed or self._is_old(page, openmetrics=openmetrics):
            page = Page(self._state, self._whole(openmetrics=openmetrics))
            self._pages[openmetrics] = page
        return page

    def holds(self, page: Page, *, openmetrics: bool) -> bool:
        """Whether ``page`` is what anybody gets who asks now for the whole."""
        kept = self._pages.get(openmetrics)
        return page is kept and not self._is_old(page, openmetrics=openmetrics)

    @property
    def _state(self) -> State:
        return self._registry.version, self._registry.passed.version

    def _is_old(self, page: Page, *, openmetrics: bool) -> bool:
        now = time.monotonic()
        if now < page.until:
            return False
        own = self._own_parts.get(openmetrics)
        return page.state != self._state or own is None or now >= own.until

    async def _whole(self, *, openmetrics: bool) -> Body:
        """All families: those that routers look at, and of the others what is kept."""
        spent = [0.0]
        state = self._state
        engines = self._merged.pieces(openmetrics=openmetrics, observed=False)
        others = passed.pieces(self._registry.passed, openmetrics=openmetrics)
        now = await _texts(chain(engines, others), spent)
        observed = await self._observed_part(openmetrics=openmetrics, spent=spent)
        own = await self._own_part(openmetrics=openmetrics)
        await self._settled()
        page = self._pages[openmetrics]
        # Of the older state, so that it is made anew although nothing comes any more.
        page.state = min(state, observed.state)
        page.spend(spent[0])
        return Body([b"".join([now, observed.text, own.text])])

    async def _some(self, *, openmetrics: bool, names: frozenset[str]) -> Body:
        engines = self._merged.pieces(openmetrics=openmetrics, names=names)
        others = passed.pieces(self._registry.passed, openmetrics=openmetrics, names=names)
        own = self._own.pieces(_form(openmetrics), names)
        text = await _texts(chain(engines, others), [0.0])
        found = [text, *await collected(own)]
        await self._settled()
        return Body([b"".join(found)])

    async def _observed_part(self, *, openmetrics: bool, spent: list[float]) -> Part:
        kept = self._observed.get(openmetrics)
        state, now = self._state, time.monotonic()
        # With other engines one of the same name may be another exporter's, or a gauge.
        present = forms(self._registry)
        is_old = kept is not None and now >= kept.until and kept.state != state
        if kept is None or is_old or kept.forms != present:
            engines = self._merged.pieces(openmetrics=openmetrics, observed=True)
            kept = Part(state, now + OBSERVED, await _texts(engines, spent), present)
            self._observed[openmetrics] = kept
        return kept

    async def _own_part(self, *, openmetrics: bool) -> Part:
        """The exporter's own families: dear to make, and no router's business."""
        kept = self._own_parts.get(openmetrics)
        now = time.monotonic()
        if kept is None or now >= kept.until:
            text = b"".join(await collected(self._own.pieces(_form(openmetrics))))
            kept = self._own_parts[openmetrics] = Part(self._state, now + OWN, text, None)
        return kept


def _form(openmetrics: bool) -> Format:
    return "openmetrics" if openmetrics else "text"


async def _texts(pieces: Iterable[list[bytes]], spent: list[float]) -> bytes:
    """``pieces`` as one; the time that making them takes is added to ``spent``."""
    return b"".join(chain.from_iterable(await collected(_clocked(pieces, spent))))


def _clocked(items: Iterable[Item], spent: list[float]) -> Iterator[Item]:
    """``items``; the time that making them takes is added to ``spent``."""
    # Not CPU time: asking for that is a system call, dearer than most of the items.
    started = time.perf_counter()
    for item in items:
        spent[0] += time.perf_counter() - started
        yield item
        started = time.perf_counter()
