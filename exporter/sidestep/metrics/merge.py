"""Addition of a record to an engine: from a sender that folded items, or a snapshot.

Counters and buckets add up, and a newer gauge replaces an older one. Adding a record to an engine
without series restores the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.slo import SLO_HANDLERS, SLO_REQUESTS, SLO_UNDECIDED
from sidestep.errors import WireError
from sidestep.metrics.engine import Engine, Key, Number
from sidestep.metrics.exponential_buckets import as_classic
from sidestep.metrics.histogram import Histogram, rebucket
from sidestep.metrics.record_codec import check_buckets, decode_polled, number_of
from sidestep.metrics.registry import Registry
from sidestep.metrics.self_described import add_samples
from sidestep.protocol.limits import OTHER, is_printable
from sidestep.protocol.records import TOTAL_LIMIT, Buckets, OpenTotals, Record
from sidestep.protocol.self_described import Family, Sample, Samples


def add_record(registry: Registry, engine: Engine, record: Record) -> int:
    """Add a record that a sender folded; return how many observations had other bounds.

    Raises:
        WireError: The record has invalid numbers, and nothing was changed; or self-described
            families contradict known ones, and everything else was added: the rejected families
            are then removed from ``record``.
    """
    moved = add_series(registry, engine, record)
    more, refused = _add_families(registry, engine, record.totals.open)
    # Families that were rejected are no longer in the record; everything else counts.
    _count_slo(engine, record)
    if refused is not None:
        raise refused
    return moved + more


def add_series(registry: Registry, engine: Engine, record: Record) -> int:
    """Add all of ``record`` except self-described families; return as ``add_record`` does.

    Raises:
        WireError: The record has invalid numbers, and nothing was changed.
    """
    totals = record.totals
    # All numbers are checked before the first is added.
    scalars = list(_scalars(engine, record))
    keyed = list(_keyed(engine, record))
    newer = totals.gauge_stamp >= engine.gauge_stamp or not totals.gauge_stamp
    _add_scalars(engine, scalars, newer=newer)
    for children, kind, found in keyed:
        # A record without gauges must not remove any.
        if found or totals.gauge_stamp:
            _add_children(registry, children, kind, found, newer=newer)
    moved = _add_histograms(engine, record)
    for window, hits in zip(engine.hit_windows, totals.hits, strict=False):
        if hits.requests:
            window.add(hits.requests, hits.queries, hits.hits)
    engine.gauge_stamp = max(engine.gauge_stamp, totals.gauge_stamp)
    engine.held_tokens = min(engine.held_tokens + totals.held_tokens, TOTAL_LIMIT)
    engine.exposed_paths |= engine.layout.optional_paths.intersection(totals.seen)
    registry.limited["label_values"] += totals.limited
    registry.touch(engine)
    return moved


def check_slots(engine: Engine, record: Record) -> None:
    """Check that all scalars of ``record`` that ``engine`` has slots for can be added.

    Raises:
        WireError: A number or a label is invalid.
    """
    for _ in _scalars(engine, record):
        pass
    for _ in _keyed(engine, record):
        pass


def restore_engine(registry: Registry, record: Record) -> Engine:
    """Return a new engine with the state in ``record``, which no stream feeds yet.

    A self-described family whose name is in the catalogue of this release is omitted, so that one
    name cannot prevent the restoration of all counters.

    Raises:
        WireError: The record has invalid numbers, or its dialect is unknown.
    """
    head = record.head
    layout = registry.layouts.get(head.engine.dialect)
    if layout is None:
        raise WireError("unknown_dialect", head.engine.dialect)
    engine = Engine(
        layout,
        head.engine,
        registry.overrides,
        registry.native,
        registry.objectives,
        created=registry.wall(),
    )
    if record.totals.created:
        engine.created = min(engine.created, record.totals.created)
    for children, row in zip(engine.keyed, layout.keyed, strict=True):
        if len(row.own_labels) == 1:
            # Values that the Hello lists would otherwise count towards the limit of open values.
            children.clear()
    engine.set_info(head.core_info, head.engine.info)
    _drop_changed_bounds(engine, record)
    engine.restarts = record.totals.restarts
    add_series(registry, engine, record)
    _add_families(registry, engine, record.totals.open)
    engine.last_seen = record.totals.last_seen
    if record.totals.polled:
        engine.statistics = decode_polled(layout.tables, record.totals.polled[-1])
        engine.absent = engine.statistics.absent
    engine.live = False
    return engine


def _drop_changed_bounds(engine: Engine, record: Record) -> None:
    """Remove histograms whose bounds changed, unless they have native buckets, which can be moved."""
    slots = {name: slot for slot, name in enumerate(engine.layout.histogram_names)}
    head, histograms = record.head, record.totals.histograms
    for index, (name, bounds) in enumerate(zip(head.histograms, head.bounds, strict=True)):
        buckets = histograms[index]
        if buckets is None or (engine.native is not None and buckets.native is not None):
            continue
        if name in slots and tuple(bounds) != engine.bounds_of(slots[name]):
            histograms[index] = None


def _scalars(engine: Engine, record: Record) -> Iterator[tuple[int, Number]]:
    """Yield the slot and the value of each number that this release has a row for."""
    slots, gauges = engine.layout.scalar_slots, engine.layout.scalar_gauges
    for (name, label), value in zip(record.head.scalars, record.totals.scalars, strict=True):
        if value is None:
            continue
        slot = slots.get((name, label))
        if slot is None:
            slot = slots.get((name, OTHER))
        if slot is not None:
            yield slot, number_of(value, negative=slot in gauges)


def _keyed(
    engine: Engine, record: Record
) -> Iterator[tuple[dict[Key, Number], str, list[tuple[Key, Number]]]]:
    """Yield each family with open label values: its children, its kind, and the numbers to add."""
    rows = {row.name: (slot, row) for slot, row in enumerate(engine.layout.keyed)}
    for name, children in zip(record.head.keyed, record.totals.keyed, strict=True):
        if name not in rows:
            continue
        slot, row = rows[name]
        if any(len(child.labels) != len(row.own_labels) for child in children):
            raise WireError("bad_label", name)
        if not all(map(is_printable, (label for child in children for label in child.labels))):
            raise WireError("bad_label", name)
        gauge = row.kind == "gauge"
        found = [(tuple(c.labels), number_of(c.value, negative=gauge)) for c in children]
        if row.name in (SLO_REQUESTS, SLO_UNDECIDED) and engine.objectives is not None:
            # The counters of an objective that was removed would never change again.
            found = [(key, n) for key, n in found if engine.objectives.includes(key)]
        yield engine.keyed[slot], row.kind, found


def _add_scalars(engine: Engine, found: list[tuple[int, Number]], *, newer: bool) -> None:
    gauges, timeless = engine.layout.scalar_gauges, engine.layout.lasting_gauges
    for slot, value in found:
        if slot not in gauges:
            engine.values[slot] = (engine.values[slot] or 0) + value
        elif newer or slot in timeless:
            engine.values[slot] = value


def _add_children(
    registry: Registry,
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
        capped = registry.capped(children, key)
        children[capped] = children.get(capped, 0) + value


def _add_histograms(engine: Engine, record: Record) -> int:
    slots = {name: slot for slot, name in enumerate(engine.layout.histogram_names)}
    head = record.head
    moved = 0
    for name, bounds, buckets in zip(
        head.histograms, head.bounds, record.totals.histograms, strict=True
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
    add_samples(registry, engine, Samples(0, 0.0, [family]), from_record=True)
    return moved


def _known_bounds(engine: Engine, totals: OpenTotals) -> Bounds:
    """Return the bounds of the engine's family of that name."""
    known = engine.open_families.get(totals.name)
    row = engine.layout.sampled_rows.get(totals.name)
    if known is None and row is not None:
        known = engine.new_family(row)
    return tuple(totals.bounds) if known is None else known.bounds


def _counts(buckets: Buckets) -> list[int]:
    """Return checked counts as numbers."""
    return [int(count) for count in buckets.counts]


def _count_slo(engine: Engine, record: Record) -> None:
    """Count ``record``'s observations for the objectives that its sender did not know."""
    if engine.objectives is None or not engine.objectives.names:
        return
    if SLO_HANDLERS[0] not in engine.layout.handled:
        # The dialect has no latencies, so the record's SLO counts were not checked.
        return
    head, totals = record.head, record.totals
    counted = {
        child.labels[-1]
        for name, children in zip(head.keyed, totals.keyed, strict=True)
        for child in children
        if name == SLO_REQUESTS
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
