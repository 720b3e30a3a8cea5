"""Metrics pages, rendered when they are asked for; concurrent scrapes share a render in flight."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain
from typing import Protocol

from sidestep.exposition import passthrough_text, protobuf_page, protobuf_samples
from sidestep.exposition.compression import Body
from sidestep.exposition.negotiation import Format
from sidestep.exposition.own_families import OwnFamilies
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.shared_renders import SharedRenders
from sidestep.exposition.text_page import TextPage
from sidestep.ingest.final_scrape import FinalScrape
from sidestep.metrics.registry import Registry
from sidestep.telemetry.cooperative import collect_in_slices
from sidestep.telemetry.self_metrics import OwnRegistry, SelfMetrics

CACHE_SECONDS = 0.1
"""How long a rendered page answers further requests."""

Key = tuple[str, Format]
"""View and format."""
Hold = Callable[[], AbstractAsyncContextManager[None]]
"""Pauses the changes of the registry for a block."""


class Durable(Protocol):
    """Snapshots of what pages expose."""

    async def settled(self) -> None:
        """Return once a snapshot holds all items applied before this call."""


class Pages:
    """Renders pages, once for all concurrent requests of the same view and format.

    Args:
        snapshots: If given, a page is returned only once a snapshot holds what it shows, so
            that no counter that Prometheus has seen decreases after a crash.
        final_scrape: If given, records the requests for whole pages.
        series_filter: Labels, families and buckets to leave out.
        hold: If given, a page is of one moment as a whole, rather than each of its families: sums by
            tenant are then those of the engines.

    Attributes:
        scraped_at: Monotonic time at which Prometheus last asked for a page; None: never.
    """

    def __init__(
        self,
        registry: Registry,
        passthrough: PassthroughRegistry,
        own: OwnRegistry,
        metrics: SelfMetrics,
        *,
        snapshots: Durable | None = None,
        final_scrape: FinalScrape | None = None,
        series_filter: SeriesFilter | None = None,
        hold: Hold | None = None,
    ) -> None:
        shown = series_filter or SeriesFilter()
        self.registry = registry
        self.passthrough = passthrough
        self.metrics = metrics
        self._own = OwnFamilies(own)
        self._snapshots = snapshots
        self._final_scrape = final_scrape
        self._hold = hold
        self._turn = asyncio.Lock()
        filters = {"engine": shown, "pod": shown.for_pod}
        self.views = {view: TextPage(registry, each) for view, each in filters.items()}
        self._with_exemplars = {
            view: TextPage(registry, each, exemplars=True) for view, each in filters.items()
        }
        # The filter on labels and bounds applies to text formats only.
        self.has_protobuf = shown.keeps_labels_and_buckets and registry.native is not None
        self._renders: SharedRenders[Key] = SharedRenders(CACHE_SECONDS)
        self.scraped_at: float | None = None

    async def page(
        self,
        view: str,
        form: Format,
        names: frozenset[str] = frozenset(),
        *,
        packed: bool = False,
        by_prometheus: bool = False,
    ) -> Sequence[bytes]:
        """Return the parts of a page, or of its gzip if ``packed``.

        The engines' families come first, then passthrough families, then the exporter's own.

        Args:
            view: ``engine``, or ``pod``, which has no protobuf.
            form: The format.
            names: Samples whose families to include, on a page that is not cached; empty for all.
            packed: Whether to compress it.
            by_prometheus: Whether Prometheus, or a program with its scrape protocol, requests it.
        """
        if by_prometheus:
            self.scraped_at = time.monotonic()
        if names:
            body = await self._render(view, form, names)
        else:
            body = await self._renders.get((view, form), lambda: self._render(view, form))
            if self._final_scrape is not None:
                self._final_scrape.note(body.stamp, by_prometheus=by_prometheus)
        return await body.packed() if packed else body.parts

    async def _render(self, view: str, form: Format, names: Collection[str] = ()) -> Body:
        """Render in slices, between which the event loop runs other work.

        Each family is of one moment, or the page is, see ``hold``. The snapshot that a page waits for
        is made after the last slice, so it holds all that the page shows.
        """
        started = time.perf_counter()
        stamp = self._final_scrape.stamp() if self._final_scrape is not None else 0.0
        async with self.at_one_moment():
            found = await collect_in_slices(self._pieces(view, form, names))
        own = await collect_in_slices(self._own.pieces(form, names))
        await self.settled()
        self.metrics.set("sidestep_scrape_duration_seconds", time.perf_counter() - started)
        return Body([*chain.from_iterable(found), b"".join(own)], stamp)

    @contextlib.asynccontextmanager
    async def at_one_moment(self) -> AsyncIterator[None]:
        """Pause all changes until the block ends, if tenants are counted.

        One page at a time: between two of them the intake runs.
        """
        if self._hold is None:
            yield
            return
        async with self._turn, self._hold():
            yield

    async def settled(self) -> None:
        """Return once a snapshot holds everything that was rendered before the call."""
        if self._snapshots is not None:
            await self._snapshots.settled()

    def _pieces(self, view: str, form: Format, names: Collection[str]) -> Iterator[list[bytes]]:
        if form == "protobuf":
            others = protobuf_samples.passthrough_pieces(self.passthrough, names)
            return chain(protobuf_page.pieces(self.registry, names), others)
        openmetrics = form == "openmetrics"
        others = passthrough_text.pieces(self.passthrough, openmetrics=openmetrics, names=names)
        has_exemplars = openmetrics and self.registry.has_exemplars
        page = (self._with_exemplars if has_exemplars else self.views)[view]
        return chain(page.pieces(openmetrics=openmetrics, names=names), others)
