"""Metrics pages that the exporter polls from an engine's server, and the handlers of their families.

A page has totals since the server's process started. The exporter adds up the differences between
polls, so its counters continue when the server restarts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from sidestep.catalog.dialect import Polled
from sidestep.catalog.layout import Layout
from sidestep.catalog.row import Handler, Row
from sidestep.engines.handlers import Handlers, increase
from sidestep.engines.row_builders import counter
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.metrics.self_described import add_samples
from sidestep.protocol.limits import MAX_FAMILIES, Count, Seconds
from sidestep.protocol.self_described import Family, Sample, Samples


class PolledPage(Polled, array_like=True, gc=False, tag="pp"):
    """The families of one engine on a page.

    Attributes:
        process: Identifies the server's process, where the page does; otherwise 0.
        families: Counters and gauges of the dialect's rows, as in ``Samples``, but the counters are
            totals since the server started.
        absent: Whether the server no longer has the engine; then there are no families.
    """

    engine: Count
    stamp: Seconds
    process: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    families: Annotated[tuple[Family, ...], Meta(max_length=MAX_FAMILIES)] = ()
    absent: bool = False


_SeriesKey = tuple[str, tuple[str, ...], tuple[str, ...]]
"""Name of a family, its labels, and their values."""


def difference(
    new: PolledPage, old: PolledPage | None
) -> tuple[list[Family], tuple[Family, ...], bool]:
    """Return what ``new`` has counted since ``old``, all totals, and whether the server has restarted.

    The former has the gauges of ``new``, too; the totals are also those that only ``old`` has. A total that is lower than before shows a restart, and so does another process; then all of
    ``new`` counts. A series that is missing counts as unchanged.
    """
    families = new.families
    known = {} if old is None else dict(_totals(old.families))
    is_reset = old is not None and (
        (new.process and old.process and new.process != old.process)
        or any(
            key in known and sample.value < known[key].value for key, sample in _totals(families)
        )
    )
    if is_reset:
        known = {}
    found: list[Family] = []
    totals: list[Family] = []
    for family in families:
        if family.kind == "gauge":
            found.append(family)
            continue
        more = []
        for sample in family.samples:
            before = known.pop(_key(family, sample), None)
            if before is None:
                more.append(sample)
            elif sample.value != before.value:
                more.append(Sample(list(sample.labels), sample.value - before.value))
        totals.append(family)
        if more:
            found.append(msgspec.structs.replace(family, samples=more))
    totals += [
        Family(name, "counter", list(labels), [sample])
        for (name, labels, _), sample in known.items()
    ]
    return found, tuple(totals), bool(is_reset)


def _key(family: Family, sample: Sample) -> _SeriesKey:
    return family.name, tuple(family.labels), tuple(sample.labels)


def _totals(families: Sequence[Family]) -> Iterator[tuple[_SeriesKey, Sample]]:
    for family in families:
        if family.kind != "gauge":
            for sample in family.samples:
                yield _key(family, sample), sample


def resets_row(prefix: str, shared: tuple[str, ...]) -> Row:
    """Return the counter of restarts, with which ``PageHandlers`` needs to be fed."""
    return counter(
        f"{prefix}resets_total",
        Handler("resets"),
        "Restarts of the server's counters, by a restart of the server or of the model.",
        shared=shared,
    )


class PageHandlers(Handlers):
    """Applies polled pages to the engines of one registry; all their rows are ``Sampled``."""

    HANDLED: ClassVar[Collection[str]] = {"resets"}

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        self._resets = layout.handler_slot("resets")
        self.appliers = {PolledPage: self._page}

    def _page(self, engine: Engine, item: PolledPage) -> None:
        before = engine.statistics if isinstance(engine.statistics, PolledPage) else None
        if item.absent:
            # The totals stay: the engine may return in the same process, which counts on.
            families = () if before is None else before.families
            process = 0 if before is None else before.process
            engine.statistics = PolledPage(0, item.stamp, process, families, absent=True)
            engine.absent = True
            return
        found, totals, is_reset = difference(item, before)
        add_samples(self.registry, engine, Samples(0, item.stamp, found))
        gauges = [family for family in found if family.kind == "gauge"]
        if _has_others(engine, gauges):
            self.registry.quota.remove_gauges(engine)
            add_samples(self.registry, engine, Samples(0, item.stamp, gauges))
        if is_reset:
            increase(engine, self._resets, 1)
        engine.statistics = PolledPage(0, item.stamp, item.process, totals)
        engine.absent = False
        engine.gauge_stamp = item.stamp


def _has_others(engine: Engine, gauges: Sequence[Family]) -> bool:
    """Return whether ``engine`` has gauges that are not on the page any more."""
    present: Mapping[str, set[tuple[str, ...]]] = {
        family.name: {tuple(sample.labels) for sample in family.samples} for family in gauges
    }
    return any(
        known.children.keys() - present.get(known.name, set())
        for known in engine.open_families.values()
        if known.kind == "gauge"
    )
