"""Metrics pages: values are copied on the event loop, and written in a thread.

Concurrent and closely following requests share a page.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol, TypeVar

from sidestep.exposition import own_families
from sidestep.exposition.engine_values import EngineCopier, RegistryValues
from sidestep.exposition.family_series import passed_on
from sidestep.exposition.negotiation import Format
from sidestep.exposition.own_families import OwnValues, own_values
from sidestep.exposition.passthrough.registry import PassthroughFamily, PassthroughRegistry
from sidestep.exposition.protobuf_page import ProtobufPage, encode_samples
from sidestep.exposition.renders import Body, SharedRenders
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_page import TextPage, write_passed_on
from sidestep.ingest.final_scrape import FinalScrape
from sidestep.metrics.registry import Registry
from sidestep.telemetry.self_metrics import OwnRegistry


class PageValues(NamedTuple):
    """Values of a page, at one moment: engines, families passed on, and the exporter's own."""

    engines: RegistryValues
    passthrough: list[PassthroughFamily]
    own: OwnValues


Hold = Callable[[], AbstractAsyncContextManager[None]]
"""Pauses the changes of the registry for a block."""


class Durable(Protocol):
    """Snapshots of what pages expose."""

    async def settled(self) -> None:
        """Return once a snapshot holds everything counted before this call."""


SLICE = 16
"""Engines copied before the event loop serves requests again: about 2 ms."""


class PageCopier:
    """Copies what a page shows, on the event loop; another thread can write what is copied.

    Args:
        hold: Pauses the intake between two frames, so that sums by tenant are those of the engines.

    Attributes:
        snapshots: If given, what was copied is sent only once a snapshot holds it, so that no counter
            that somebody has seen decreases after a crash.
    """

    def __init__(
        self,
        registry: Registry,
        passthrough: PassthroughRegistry,
        own: OwnRegistry,
        *,
        hold: Hold = contextlib.nullcontext,
        snapshots: Durable | None = None,
    ) -> None:
        self.registry = registry
        self.own = own
        self.snapshots = snapshots
        self._engines = EngineCopier(registry)
        self._passthrough = passthrough
        self._hold = hold

    async def copy(self, names: Collection[str] = (), *, with_gone: bool = False) -> PageValues:
        """Return the values of this moment.

        While the intake is paused, the loop serves requests between two slices of the engines.
        """
        async with self._hold():
            for number, engine in enumerate([*self.registry.engines.values()], 1):
                self._engines.prepare(engine)
                if number % SLICE == 0:
                    await asyncio.sleep(0)
            return PageValues(
                self._engines.copy(with_gone=with_gone),
                self._passthrough.families(names),
                own_values(self.own, names),
            )

    async def settled(self) -> None:
        """Return once a snapshot holds what was copied."""
        if self.snapshots is not None:
            await self.snapshots.settled()


CACHE_SECONDS = 0.1
"""How long a rendered page answers further requests."""

Key = tuple[str, Format]
"""View and format."""
Result = TypeVar("Result")


class Pages:
    """Renders pages, once for all concurrent requests of the same view and format.

    Args:
        final_scrape: If given, records the requests for whole pages.

    Attributes:
        scraped_at: Monotonic time at which Prometheus last asked for a page; None: never.
    """

    def __init__(
        self,
        copier: PageCopier,
        *,
        final_scrape: FinalScrape | None = None,
        series_filter: SeriesFilter | None = None,
    ) -> None:
        shown = series_filter or SeriesFilter()
        self.registry = copier.registry
        self._copier = copier
        self._final_scrape = final_scrape
        filters = {"engine": shown, "pod": shown.for_pod}
        self.views = {view: TextPage(each) for view, each in filters.items()}
        self._with_exemplars = {
            view: TextPage(each, exemplars=True) for view, each in filters.items()
        }
        native = copier.registry.series.native
        self._protobuf = ProtobufPage(classic_buckets=native is None or native.both)
        # The filter on labels and bounds applies to text formats only.
        self.has_protobuf = shown.keeps_labels_and_buckets and native is not None
        self._renders: SharedRenders[Key] = SharedRenders(CACHE_SECONDS)
        # One thread: the renders of a view share the text of engines that have not changed.
        self._thread = ThreadPoolExecutor(1, "sidestep-pages")
        self.scraped_at: float | None = None

    async def page(
        self,
        view: str,
        form: Format,
        names: frozenset[str] = frozenset(),
        *,
        by_prometheus: bool = False,
    ) -> Body:
        """Return a page: families of engines, then passthrough families, then the exporter's own."""
        if by_prometheus:
            self.scraped_at = time.monotonic()
        if names:
            return await self._render(view, form, names)
        body = await self._renders.get((view, form), lambda: self._render(view, form))
        if self._final_scrape is not None:
            self._final_scrape.note(body.stamp, by_prometheus=by_prometheus)
        return body

    async def written(
        self,
        write: Callable[[PageValues], Result],
        names: Collection[str] = (),
        *,
        with_gone: bool = False,
    ) -> Result:
        """Return what ``write`` makes of the present values, in a thread, once a snapshot holds them."""
        values = await self._copier.copy(names, with_gone=with_gone)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, write, values)
        await self._copier.settled()
        return found

    async def _render(self, view: str, form: Format, names: Collection[str] = ()) -> Body:
        started = time.perf_counter()
        stamp = self._final_scrape.stamp() if self._final_scrape is not None else 0.0
        parts = await self.written(
            lambda values: self._written(values, view, form, names),
            names,
            with_gone=bool(self.views[view].series_filter.dropped_labels),
        )
        seconds = time.perf_counter() - started
        self._copier.own.metrics.set("sidestep_scrape_duration_seconds", seconds)
        return Body(parts, stamp)

    def _written(
        self, values: PageValues, view: str, form: Format, names: Collection[str]
    ) -> list[bytes]:
        engines, passthrough, own = values
        if form == "protobuf":
            parts = self._protobuf.write(engines, names)
            for family in passthrough:
                parts += encode_samples(passed_on(family))
        else:
            openmetrics = form == "openmetrics"
            has_exemplars = openmetrics and engines.has_exemplars
            page = (self._with_exemplars if has_exemplars else self.views)[view]
            parts = page.write(engines, openmetrics=openmetrics, names=names)
            parts += write_passed_on(passthrough, openmetrics=openmetrics)
        return [*parts, *own_families.write(own, form)]
