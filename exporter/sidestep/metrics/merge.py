"""Addition of totals to an engine: those of a sender that folded items, or of a snapshot.

Counters and buckets add up, and a newer gauge replaces an older one. Adding totals to an engine
without series restores the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.slo import SLO_REQUESTS, SLO_UNDECIDED
from sidestep.errors import WireError
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Key, Number
from sidestep.metrics.exponential_buckets import as_classic
from sidestep.metrics.histogram import Histogram, rebucket
from sidestep.metrics.registry import Registry
from sidestep.metrics.self_described import add_samples
from sidestep.metrics.totals_codec import (
    SAVED_PARTS,
    check_buckets,
    decode_polled,
    extremes,
    number_of,
)
from sidestep.protocol.engine_totals import Buckets, EngineTotals, OpenTotals
from sidestep.protocol.limits import MAX_OBSERVATIONS, MAX_OPEN_VALUES, OTHER, is_printable
from sidestep.protocol.self_described import Family, Sample, Samples

LARGEST = 10**30
"""Largest accepted number. Items within their limits do not reach it in years, and sums of such
numbers over all sequence numbers still fit into a float and a snapshot."""
MAX_CHILDREN = 4 * MAX_OPEN_VALUES
"""Most children of one family; a family with two labels may have twice the values."""


def add_totals(registry: Registry, engine: Engine, added: EngineTotals) -> int:
    """Add totals of folded items; return how many observations had other bounds.

    Raises:
        WireError: A number is invalid, and nothing was changed; or self-described families
            contradict known ones, and everything else was added: the rejected families are then
            removed from ``added``.
    """
    moved = add_series(registry, engine, added)
    more, refused = _add_families(registry, engine, added.totals.open)
    # Families that were rejected are no longer in there; everything else counts.
    _count_slo(engine, added)
    if refused is not None:
        raise refused
    return moved + more


def add_series(
    registry: Registry, engine: Engine, added: EngineTotals, *, is_snapshot: bool = False
) -> int:
    """Add all of ``added`` except self-described families; return as ``add_totals`` does.

    The label values of a snapshot were within their limits when they were counted: those of tenants
    and objectives have others than ``Registry.capped``.

    Raises:
        WireError: A number is invalid, and nothing was changed.
    """
    totals = added.totals
    # All numbers are checked before the first is added.
    scalars = list(_scalars(engine, added))
    keyed = list(_keyed(engine, added))
    newer = totals.gauge_stamp >= engine.gauge_stamp or not totals.gauge_stamp
    _add_scalars(engine, scalars, newer=newer)
    for children, kind, found in keyed:
        # Totals without gauges must not remove any.
        if found or totals.gauge_stamp:
            limited_by = None if is_snapshot else registry
            _add_children(limited_by, children, kind, found, newer=newer)
    moved = _add_histograms(engine, added)
    for part in SAVED_PARTS:
        engine.part(part).add(totals)
    engine.gauge_stamp = max(engine.gauge_stamp, totals.gauge_stamp)
    engine.exposed_paths |= engine.layout.optional_paths.intersection(totals.seen)
    registry.limited["label_values"] += totals.limited
    registry.touch(engine)
    return moved


def restore_engine(registry: Registry, added: EngineTotals) -> Engine:
    """Return a new engine with these totals, which no stream feeds yet.

    A self-described family is omitted if the catalogue of this release has its name: one name must
    not prevent that all counters are restored.

    Raises:
        WireError: A number is invalid.
    """
    head = added.head
    layout = registry.layouts[head.engine.dialect]
    engine = Engine(layout, head.engine, registry.series, created=registry.wall())
    if added.totals.created:
        engine.created = min(engine.created, added.totals.created)
    for children, row in zip(engine.keyed, layout.keyed, strict=True):
        if len(row.own_labels) == 1:
            # Values that the last Hello lists may be more than the limit has left.
            children.clear()
    engine.set_info(head.core_info, head.engine.info)
    _drop_changed_bounds(engine, added)
    engine.restarts = added.totals.restarts
    add_series(registry, engine, added, is_snapshot=True)
    _add_families(registry, engine, added.totals.open)
    engine.last_seen = added.totals.last_seen
    if added.totals.polled:
        engine.statistics = decode_polled(layout.tables, added.totals.polled[-1])
        engine.absent = engine.statistics.absent
    engine.live = False
    return engine


def _drop_changed_bounds(engine: Engine, added: EngineTotals) -> None:
    """Remove histograms whose bounds changed, unless they have native buckets, which can be moved."""
    slots = {name: slot for slot, name in enumerate(engine.layout.histogram_names)}
    head, histograms = added.head, added.totals.histograms
    for index, (name, bounds) in enumerate(zip(head.histograms, head.bounds, strict=True)):
        buckets = histograms[index]
        if buckets is None or (engine.settings.native is not None and buckets.native is not None):
            continue
        if name in slots and tuple(bounds) != engine.bounds_of(slots[name]):
            histograms[index] = None


def _scalars(engine: Engine, added: EngineTotals) -> Iterator[tuple[int, Number]]:
    """Yield the slot and the value of each scalar that this release has a row for."""
    slots, gauges = engine.layout.scalar_slots, engine.layout.scalar_gauges
    for (name, label), value in zip(added.head.scalars, added.totals.scalars, strict=True):
        if value is None:
            continue
        slot = slots.get((name, label))
        if slot is None:
            slot = slots.get((name, OTHER))
        if slot is not None:
            yield slot, number_of(value, negative=slot in gauges)


def _keyed(
    engine: Engine, added: EngineTotals
) -> Iterator[tuple[dict[Key, Number], str, list[tuple[Key, Number]]]]:
    """Yield each family with open label values: its children, its kind, and the numbers to add."""
    rows = {row.name: (slot, row) for slot, row in enumerate(engine.layout.keyed)}
    for name, children in zip(added.head.keyed, added.totals.keyed, strict=True):
        if name not in rows:
            continue
        slot, row = rows[name]
        if any(len(child.labels) != len(row.own_labels) for child in children):
            raise WireError("bad_label", name)
        if not all(map(is_printable, (label for child in children for label in child.labels))):
            raise WireError("bad_label", name)
        gauge = row.kind == "gauge"
        found = [(tuple(c.labels), number_of(c.value, negative=gauge)) for c in children]
        if row.name in (SLO_REQUESTS, SLO_UNDECIDED):
            # The counters of an objective that was removed would never change again.
            found = [(key, n) for key, n in found if engine.settings.objectives.includes(key)]
        yield engine.keyed[slot], row.kind, found


def _add_scalars(engine: Engine, found: list[tuple[int, Number]], *, newer: bool) -> None:
    gauges, timeless = engine.layout.scalar_gauges, engine.layout.lasting_gauges
    for slot, value in found:
        if slot not in gauges:
            engine.values[slot] = (engine.values[slot] or 0) + value
        elif newer or slot in timeless:
            engine.values[slot] = value


def _add_children(
    limited_by: Registry | None,
    children: dict[Key, Number],
    kind: str,
    found: list[tuple[Key, Number]],
    *,
    newer: bool,
) -> None:
    if kind == "gauge":
        if newer:
            children.clear()
            children.update(found)
        return
    for key, value in found:
        own = key if limited_by is None else limited_by.capped(children, key)
        children[own] = children.get(own, 0) + value


def _add_histograms(engine: Engine, added: EngineTotals) -> int:
    slots = {name: slot for slot, name in enumerate(engine.layout.histogram_names)}
    head = added.head
    moved = 0
    for name, bounds, buckets in zip(
        head.histograms, head.bounds, added.totals.histograms, strict=True
    ):
        if buckets is not None and name in slots:
            moved += _add_buckets(engine.histogram(slots[name]), tuple(bounds), buckets)
    return moved


def _add_families(
    registry: Registry, engine: Engine, families: list[OpenTotals]
) -> tuple[int, WireError | None]:
    """Add self-described families; return the moved observations and the last error.

    Rejected families are removed from ``families``.
    """
    moved = 0
    refused: WireError | None = None
    for family in list(families):
        try:
            moved += add_family(registry, engine, family)
        except WireError as error:
            refused = error
            families.remove(family)
    return moved, refused


def _add_buckets(histogram: Histogram, bounds: Bounds, buckets: Buckets) -> int:
    """Add counts; return how many moved to other bounds, by the upper bound of their bucket."""
    if bounds == histogram.bounds:
        histogram.add(_counts(buckets), buckets.total, buckets.native)
        return 0
    counts = _rebucketed(bounds, buckets, histogram.bounds)
    histogram.add(counts, buckets.total, buckets.native)
    return sum(counts)


def _rebucketed(bounds: Bounds, buckets: Buckets, wanted: Bounds) -> list[int]:
    """Return counts for the bounds ``wanted``, from the native buckets if there are any."""
    if buckets.native is not None:
        return rebucket(*as_classic(buckets.native), wanted)
    return rebucket(bounds, _counts(buckets), wanted)


def add_family(registry: Registry, engine: Engine, totals: OpenTotals) -> int:
    """Add children of a self-described family; return how many observations moved to other bounds.

    Raises:
        WireError: The family contradicts a known one, and nothing was added.
    """
    wanted = _known_bounds(engine, totals)
    family = Family(totals.name, totals.kind, totals.labels, [], totals.help, list(wanted))
    moved = 0
    for child in totals.children:
        sample = Sample(child.labels, number_of(child.value, negative=True))
        if child.buckets is not None:
            check_buckets(child.buckets, totals.bounds)
            sample.counts, sample.total = _counts(child.buckets), child.buckets.total
            sample.native = child.buckets.native
            if tuple(totals.bounds) != wanted:
                sample.counts = _rebucketed(tuple(totals.bounds), child.buckets, wanted)
                moved += sum(sample.counts)
        family.samples.append(sample)
    add_samples(registry, engine, Samples(0, 0.0, [family]), from_totals=True)
    return moved


def _known_bounds(engine: Engine, totals: OpenTotals) -> Bounds:
    """Return the bounds of the engine's family of that name."""
    known = engine.open_families.get(totals.name)
    row = engine.layout.sampled_rows.get(totals.name)
    if known is None and row is not None:
        known = engine.new_family(row)
    return tuple(totals.bounds) if known is None else known.bounds


def _counts(buckets: Buckets) -> list[int]:
    return [int(count) for count in buckets.counts]


def _count_slo(engine: Engine, added: EngineTotals) -> None:
    """Count the observations in ``added`` for the objectives that its sender did not know."""
    if not engine.settings.objectives.names:
        return
    head, totals = added.head, added.totals
    counted = {
        label
        for name, children in zip(head.keyed, totals.keyed, strict=True)
        if name == SLO_REQUESTS
        for child in children
        for label in child.labels[-1:]
    }
    for name, bounds, buckets in zip(head.histograms, head.bounds, totals.histograms, strict=True):
        if buckets is not None:
            _count_family_slo(engine, name.partition("|")[0], bounds, buckets, counted)
    for family in totals.open:
        for child in family.children:
            if child.buckets is not None:
                _count_family_slo(engine, family.name, family.bounds, child.buckets, counted)


def _count_family_slo(
    engine: Engine, family: str, bounds: Sequence[float], buckets: Buckets, counted: set[str]
) -> None:
    slo_counter = engine.slo_counter(family)
    if slo_counter is not None:
        slo_counter.count_buckets(tuple(bounds), _counts(buckets), counted)


def check_totals(engine: Engine, added: EngineTotals) -> None:
    """Check that all of ``added`` except self-described families can be added to ``engine``.

    Raises:
        WireError: A number is too large, a series occurs twice, or there are more children than an
            engine may have; nothing of them may be added.
    """
    head, totals = added.head, added.totals
    for names in (head.scalars, head.histograms, head.keyed, [one.name for one in totals.open]):
        if len({*names}) != len(names):
            raise WireError("bad_item", "totals name a series twice")
    families = [*totals.keyed, *(family.children for family in totals.open)]
    sizes = [len(children) for children in families]
    if sum(sizes) > MAX_OBSERVATIONS or max(sizes, default=0) > MAX_CHILDREN:
        raise WireError("over_limit", "more children than an engine has")
    children = [child for some in families for child in some]
    histograms = [*totals.histograms, *(child.buckets for child in children)]
    values = [*totals.scalars, *(child.value for child in children)]
    values += [buckets.total for buckets in histograms if buckets is not None]
    numbers = [number_of(value) if isinstance(value, str) else value or 0 for value in values]
    numbers += [extremes(buckets.counts)[1] for buckets in histograms if buckets is not None]
    if any(not -LARGEST <= number <= LARGEST for number in numbers):
        raise WireError("bad_item", "a number that is too large")
    # Both raise an error for what cannot be added.
    deque(_scalars(engine, added), maxlen=0)
    deque(_keyed(engine, added), maxlen=0)
