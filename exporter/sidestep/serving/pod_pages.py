"""The pod's page: made once for all the routers that poll it, and kept in their compression.

Request routers ask every 50 ms, each of their replicas for itself. However many ask, making
the page takes a bounded share of one core.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from sidestep.registry import Registry
from sidestep.render import passed
from sidestep.render.merged import Merged
from sidestep.render.own import OwnTexts
from sidestep.serving.formats import Format
from sidestep.serving.packing import Body
from sidestep.serving.turns import collected

SHARE = 100
"""A page is kept for so many times as long as it took to make: 1 % of a core, but for LONGEST."""
LONGEST = 0.1
"""Seconds that a page is kept at most while it changes."""
OWN = 1.0
"""Seconds for which the exporter's own part of it may be kept."""
State = tuple[int, int]
Item = TypeVar("Item")


class Page:
    """One page in the making, or made.

    Attributes:
        state: What of the registry is on it.
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
        self._own_texts: dict[bool, tuple[float, bytes]] = {}

    async def page(
        self, *, openmetrics: bool, names: frozenset[str], packed: bool
    ) -> Sequence[bytes]:
        """The parts of the whole page, or that of some ``names``; in gzip where it is to be ``packed``."""
        if names:
            chosen = Page(self._state, self._made(openmetrics=openmetrics, names=names))
            return await chosen.parts(packed=packed)
        page = self._pages.get(openmetrics)
        if page is None or page.failed or self._is_old(page, openmetrics=openmetrics):
            page = Page(self._state, self._timed(openmetrics=openmetrics))
            self._pages[openmetrics] = page
        return await page.parts(packed=packed)

    @property
    def _state(self) -> State:
        return self._registry.version, self._registry.passed.version

    def _is_old(self, page: Page, *, openmetrics: bool) -> bool:
        now = time.monotonic()
        if now < page.until:
            return False
        kept_until, _ = self._own_texts.get(openmetrics, (0.0, b""))
        return page.state != self._state or now >= kept_until

    async def _timed(self, *, openmetrics: bool) -> Body:
        spent = [0.0]
        body = await self._made(openmetrics=openmetrics, names=frozenset(), spent=spent)
        self._pages[openmetrics].spend(spent[0])
        return body

    async def _made(
        self, *, openmetrics: bool, names: frozenset[str], spent: list[float] | None = None
    ) -> Body:
        engines = self._merged.pieces(openmetrics=openmetrics, names=names)
        others = passed.pieces(self._registry.passed, openmetrics=openmetrics, names=names)
        clocked = _clocked(chain(engines, others), [0.0] if spent is None else spent)
        families = await collected(clocked)
        if names:
            own = b"".join(await collected(self._own.pieces(_form(openmetrics), names)))
        else:
            own = await self._own_text(openmetrics=openmetrics)
        await self._settled()
        return Body([b"".join([*chain.from_iterable(families), own])])

    async def _own_text(self, *, openmetrics: bool) -> bytes:
        """The exporter's own part: dear to make, and no router's business."""
        now = time.monotonic()
        until, text = self._own_texts.get(openmetrics, (0.0, b""))
        if now >= until:
            text = b"".join(await collected(self._own.pieces(_form(openmetrics))))
            self._own_texts[openmetrics] = now + OWN, text
        return text


def _form(openmetrics: bool) -> Format:
    return "openmetrics" if openmetrics else "text"


def _clocked(items: Iterable[Item], spent: list[float]) -> Iterator[Item]:
    """``items``; the time that making them takes is added to ``spent``."""
    # Not CPU time: asking for that is a system call, dearer than most of the items.
    started = time.perf_counter()
    for item in items:
        spent[0] += time.perf_counter() - started
        yield item
        started = time.perf_counter()
