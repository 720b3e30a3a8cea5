"""Adding a record to an engine: what a sender folded, or all that a snapshot kept of it.

Adding it to an engine that has nothing yet restores it; adding what a sender folded to an
engine that went on is the same work: counters and buckets add up, a gauge yields to a newer one.
"""

from __future__ import annotations

from collections.abc import Iterator

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.slo import SLO_REQUESTS, SLO_UNDECIDED
from sidestep.errors import WireError
from sidestep.metrics.engine import Engine, Key, Number
from sidestep.metrics.exponential_buckets import as_classic
from sidestep.metrics.histogram import Histogram, rebucket
from sidestep.metrics.record_codec import HIT_WINDOWS, check_buckets, number_of
from sidestep.metrics.registry import Registry
from sidestep.metrics.self_described import add_samples
from sidestep.protocol.limits import OTHER, is_printable
from sidestep.protocol.records import TOTAL_LIMIT, Buckets, OpenTotals, Record
from sidestep.protocol.self_described import Family, Sample, Samples


def add_record(registry: Registry, engine: Engine, record: Record) -> int:
    """Add ``record`` to the series of ``engine``; how many observations had foreign bounds.

    Raises:
        WireError: It holds what cannot be counted, and nothing was changed; or families
            that describe themselves contradict what is known, and all others were added: ``record``
            has those no more.
    """
    moved, refused = _merge(registry, engine, record)
    if refused is not None:
        raise refused
    return moved


def _merge(registry: Registry, engine: Engine, record: Record) -> tuple[int, WireError | None]:
    """Likewise; what is wrong with families that describe themselves is returned."""
    totals = record.totals
    # Numbers are looked at before the first is added.
    scalars = list(_scalars(engine, record))
    keyed = list(_keyed(engine, record))
    newer = totals.gauge_stamp >= engine.gauge_stamp or not totals.gauge_stamp
    _add_scalars(engine, scalars, newer=newer)
    for children, kind, found in keyed:
        # A record without gauges says of none that it is gone.
        if found or totals.gauge_stamp:
            _add_children(registry, children, kind, found, newer=newer)
    moved = _add_histograms(engine, record)
    for window, hits in zip(HIT_WINDOWS, totals.hits, strict=False):
        if hits.requests:
            getattr(engine, window).add(hits.requests, hits.queries, hits.hits)
    engine.gauge_stamp = max(engine.gauge_stamp, totals.gauge_stamp)
    engine.held_tokens = min(engine.held_tokens + totals.held_tokens, TOTAL_LIMIT)
    engine.exposed_paths |= engine.layout.optional_paths.intersection(totals.seen)
    registry.limited["label_values"] += totals.limited
    registry.touch(engine)
    more, refused = _add_families(registry, engine, totals.open)
    return moved + more, refused


def check_slots(engine: Engine, record: Record) -> None:
    """Whether what has a place in ``engine`` can be added to it.

    Raises:
        WireError: It cannot.
    """
    for _ in _scalars(engine, record):
        pass
    for _ in _keyed(engine, record):
        pass


def restore_engine(registry: Registry, record: Record) -> Engine:
    """The engine that ``record`` was made of, of which nobody has told yet.

    A family that describes itself and whose name the catalogue has by now is left out:
    one name must not cost all counters.

    Raises:
        WireError: It holds what cannot be counted, or its dialect is unknown.
    """
    head = record.head
    layout = registry.layouts.get(head.engine.dialect)
    if layout is None:
        raise WireError("unknown_dialect", head.engine.dialect)
    engine = Engine(layout, head.engine, registry.overrides, registry.native, registry.objectives)
    if record.totals.created:
        engine.created = min(engine.created, record.totals.created)
    for children, row in zip(engine.keyed, layout.keyed, strict=True):
        if len(row.own_labels) == 1:
            # What the last Hello knew beforehand would take places from what the record has.
            children.clear()
    engine.core_info = head.core_info
    engine.info = {**head.core_info, **head.engine.info}
    _drop_foreign(engine, record)
    engine.restarts = record.totals.restarts
    _merge(registry, engine, record)
    engine.last_seen = record.totals.last_seen
    if record.totals.looked:
        engine.statistics = record.totals.looked[-1]
        engine.absent = engine.statistics.stats is None
    engine.live = False
    return engine


def add_counts(registry: Registry, engine: Engine, record: Record, *, gauges: bool) -> None:
    """Add what a checked ``record`` has, but for families that describe themselves.

    What it does not have is not begun at 0, and label values that its own exporter has limited
    are not counted again.

    Args:
        registry: Which has the engine.
        engine: Of the record's dialect.
        record: What another process counted.
        gauges: Whether it says how the engine is; else only what it counted is added.
    """
    totals, of_now = record.totals, engine.layout.scalar_gauges
    scalars = [found for found in _scalars(engine, record) if gauges or found[0] not in of_now]
    _add_scalars(engine, scalars, newer=True)
    for children, kind, found in _keyed(engine, record):
        if kind != "gauge":
            _add_children(registry, children, kind, found, newer=False)
        elif gauges:
            children.update(found)
    _add_histograms(engine, record)
    for window, hits in zip(HIT_WINDOWS, totals.hits, strict=False):
        if hits.requests:
            getattr(engine, window).add(hits.requests, hits.queries, hits.hits)
    engine.exposed_paths |= engine.layout.optional_paths.intersection(totals.seen)
    engine.restarts = min(engine.restarts + totals.restarts, TOTAL_LIMIT)
    engine.last_seen = max(engine.last_seen, totals.last_seen)
    if totals.created:
        engine.created = min(engine.created, totals.created)


def _drop_foreign(engine: Engine, record: Record) -> None:
    """A histogram whose bounds are others now starts anew: only native counts can be moved."""
    slots = {name: slot for slot, name in enumerate(engine.layout.histogram_names)}
    head, histograms = record.head, record.totals.histograms
    for place, (name, bounds) in enumerate(zip(head.histograms, head.bounds, strict=True)):
        buckets = histograms[place]
        if buckets is None or (engine.native is not None and buckets.native is not None):
            continue
        if name in slots and tuple(bounds) != engine.bounds_of(slots[name]):
            histograms[place] = None


def _scalars(engine: Engine, record: Record) -> Iterator[tuple[int, Number]]:
    """Where each number goes; what no row here has is left out."""
    places, gauges = engine.layout.scalar_slots, engine.layout.scalar_gauges
    for (name, label), value in zip(record.head.scalars, record.totals.scalars, strict=True):
        if value is None:
            continue
        slot = places.get((name, label))
        if slot is None:
            slot = places.get((name, OTHER))
        if slot is not None:
            yield slot, number_of(value, negative=slot in gauges)


def _keyed(
    engine: Engine, record: Record
) -> Iterator[tuple[dict[Key, Number], str, list[tuple[Key, Number]]]]:
    """Children of each family with open label values, its kind, and what to add to them."""
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
            # What is an objective no more would stand still for ever.
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
            moved += _add(engine.histogram(slots[name]), tuple(bounds), buckets)
    return moved


def _add_families(
    registry: Registry, engine: Engine, families: list[OpenTotals]
) -> tuple[int, WireError | None]:
    """Add those that describe themselves, all that can be; say what is wrong with the last other.

    ``families`` are those that were added afterwards.
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


def _add(histogram: Histogram, bounds: Bounds, buckets: Buckets) -> int:
    """Add counts; those of other bounds land by their upper bound, and are returned."""
    if bounds == histogram.bounds:
        histogram.add(_counts(buckets), buckets.total, buckets.native)
        return 0
    counts = _rebucketed(bounds, buckets, histogram.bounds)
    histogram.add(counts, buckets.total, buckets.native)
    return sum(counts)


def _rebucketed(bounds: Bounds, buckets: Buckets, wanted: Bounds) -> list[int]:
    """Counts by other bounds: of native buckets, where there are any, for these are finer."""
    if buckets.native is not None:
        return rebucket(*as_classic(buckets.native), wanted)
    return rebucket(bounds, _counts(buckets), wanted)


def add_family(registry: Registry, engine: Engine, totals: OpenTotals) -> int:
    """Add a family that describes itself, or some children of it; observations that moved.

    Raises:
        WireError: It contradicts what is known, and nothing was added.
    """
    wanted = _wanted(engine, totals)
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
    add_samples(registry, engine, Samples(0, 0.0, [family]), kept=True)
    return moved


def _wanted(engine: Engine, totals: OpenTotals) -> Bounds:
    """The bounds of the engine's family of that name."""
    known = engine.open_families.get(totals.name)
    row = engine.layout.sampled_rows.get(totals.name)
    if known is None and row is not None:
        known = engine.new_family(row)
    return tuple(totals.bounds) if known is None else known.bounds


def _counts(buckets: Buckets) -> list[int]:
    """Counts that are checked, as numbers."""
    return [int(count) for count in buckets.counts]
