"""What engines have of a family at one moment: copied of all of them at once, and read afterwards.

To copy takes a fraction of a microsecond a series, to read it some: whoever reads can let the event
loop have its turns meanwhile, and the family is of one moment nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import TypeVar, cast

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import OBSERVED, Computed, Constant, Info
from sidestep.catalog.slo import SLO_REQUESTS
from sidestep.exposition.aggregate import Merge, merged
from sidestep.exposition.families import Family, labels_with, present, showing, stored
from sidestep.metrics.availability import update_availability
from sidestep.metrics.computed_gauges import computed_gauge
from sidestep.metrics.engine import Engine, Key, Number, OpenFamily
from sidestep.metrics.histogram import Histogram, State
from sidestep.metrics.registry import Registry

AT_ONCE = 50
"""Children that are combined between two turns of the loop: some microseconds each."""

Shown = TypeVar("Shown")
"""A copy of what a page shows of a histogram."""
Children = Sequence[tuple[Key, Number | Shown]]
"""By own label values."""
Copy = tuple[Engine, int, Key, Children[Shown]]
"""What one engine has of a family: how it looked, own label names, and children."""
Labels = tuple[tuple[str, str], ...]
"""Sorted by name."""

IN_NUMBERS = frozenset({"scalars", "computed", "constant"})
"""Places of rows that have a plain number, or none, for each of their label values."""


def state_of(histogram: Histogram) -> State:
    """What a text page shows of it."""
    return histogram.bounds, histogram.counts.copy(), histogram.sum


def numbers_of(placed: SlotAssignment, engines: Sequence[Engine]) -> list[Number | None]:
    """What ``engines`` have of a row that is ``IN_NUMBERS``, one after the other, as it is kept."""
    slots, source = placed.slots, placed.row.source
    if placed.storage == "scalars":
        if len(slots) == 1:
            slot = slots[0]
            return [engine.values[slot] for engine in engines]
        chosen = itemgetter(*slots)
        return [value for engine in engines for value in chosen(engine.values)]
    if isinstance(source, Computed):
        return [computed_gauge(engine, source.name) for engine in engines]
    assert isinstance(source, Constant)
    return [source.value] * len(engines)


def histograms_of(
    placed: SlotAssignment, engines: Sequence[Engine], copy: Callable[[Histogram], Shown]
) -> list[Shown | None]:
    """Likewise, of histograms in slots."""
    slots = placed.slots
    return [
        None if one is None else copy(one)
        for engine in engines
        for kept in (engine.histograms,)
        for one in [kept[slot] for slot in slots]
    ]


def copied(
    family: Family,
    placed: SlotAssignment | None,
    engines: Sequence[Engine],
    copy: Callable[[Histogram], Shown],
) -> Iterator[Copy[Shown]]:
    """What each of ``engines`` has of ``family`` at the moment of the call.

    Args:
        family: The family.
        placed: Where the engines' dialect has it; None where they described it themselves.
        engines: Those that ``view.showing`` has of a dialect, or had.
        copy: Makes a copy of what is to be shown of a histogram.
    """
    looks = [engine.label_version for engine in engines]
    if placed is not None and (placed.storage in IN_NUMBERS or placed.storage == "histogram"):
        values: Sequence[Number | Shown | None]
        if placed.storage == "histogram":
            values = histograms_of(placed, engines, copy)
        else:
            values = numbers_of(placed, engines)
        return _in_slots(placed, engines, looks, values)
    if placed is not None and placed.storage == "keyed":
        if placed.row.name == SLO_REQUESTS:
            for engine in engines:
                update_availability(engine)
        slot = placed.slots[0]
        kept = [engine.keyed[slot].copy() for engine in engines]
        return _keyed(placed, engines, looks, kept)
    if placed is not None and isinstance(placed.row.source, Info):
        said = placed.row.source.name
        return _infos(engines, looks, [engine.info.get(said) for engine in engines])
    if placed is None:
        return _listed(engines, looks, [_own_form(engine, family) for engine in engines], copy)
    name = stored(placed)
    return _listed(engines, looks, [engine.open_families.get(name) for engine in engines], copy)


def _in_slots(
    placed: SlotAssignment,
    engines: Sequence[Engine],
    looks: Sequence[int],
    values: Sequence[Number | Shown | None],
) -> Iterator[Copy[Shown]]:
    names, keys, per = placed.row.own_labels, placed.label_values, placed.row.unit_divisor
    width = len(keys)
    for at, (engine, look) in enumerate(zip(engines, looks, strict=True)):
        some = zip(keys, values[at * width : (at + 1) * width], strict=True)
        children = [(key, value) for key, value in some if value is not None]
        yield engine, look, names, children if per == 1 else _in_unit(children, per)


def _keyed(
    placed: SlotAssignment,
    engines: Sequence[Engine],
    looks: Sequence[int],
    kept: Sequence[Mapping[Key, Number]],
) -> Iterator[Copy[Shown]]:
    names, per = placed.row.own_labels, placed.row.unit_divisor
    for engine, look, values in zip(engines, looks, kept, strict=True):
        children: Children[Shown] = [*values.items()]
        yield engine, look, names, children if per == 1 else _in_unit(children, per)


def _infos(
    engines: Sequence[Engine], looks: Sequence[int], said: Sequence[Mapping[str, str] | None]
) -> Iterator[Copy[Shown]]:
    """What is said is in the labels; the next Hello brings others."""
    for engine, look, labels in zip(engines, looks, said, strict=True):
        if labels is None:
            yield engine, look, (), []
        else:
            yield engine, look, tuple(labels), [(tuple(labels.values()), 1)]


def _in_unit(children: Children[Shown], per: int) -> Children[Shown]:
    """As it is shown; of what is kept in another unit there are plain numbers only."""
    return [(k, value / per) for k, value in children if isinstance(value, int | float)]


def _own_form(engine: Engine, family: Family) -> OpenFamily | None:
    """What ``engine`` has of a family that it described itself."""
    found = engine.open_families.get(family.name)
    # Two engines may describe one name differently; the first one's form stands.
    if found is None or (found.kind, found.labels) != (family.kind, family.labels):
        return None
    return found


def _listed(
    engines: Sequence[Engine],
    looks: Sequence[int],
    found: Sequence[OpenFamily | None],
    copy: Callable[[Histogram], Shown],
) -> Iterator[Copy[Shown]]:
    """What Samples items brought, whose sender may have labels beside the row's."""
    kept: list[tuple[Key, Mapping[Key, Number | Shown]]] = []
    for one in found:
        if one is None:
            kept.append(((), {}))
        elif one.kind in OBSERVED:
            children = one.children.items()
            kept.append((one.labels, {k: copy(v) for k, v in children if isinstance(v, Histogram)}))
        else:
            # All of them are numbers: what a family is fed with is of its kind.
            kept.append((one.labels, cast("dict[Key, Number]", one.children.copy())))
    return (
        (engine, look, names, [*values.items()])
        for engine, look, (names, values) in zip(engines, looks, kept, strict=True)
    )


def copies(
    registry: Registry, family: Family, copy: Callable[[Histogram], Shown]
) -> Iterator[Copy[Shown]]:
    """What all engines show of ``family`` at the moment of the call."""
    found: list[Iterator[Copy[Shown]]] = []
    if not family.places:
        everyone = present(registry, "", live=family.kind == "gauge")
        some = [engine for engine in everyone if family.name in engine.open_families]
        found.append(copied(family, None, some, copy))
    for dialect, placed in family.places.items():
        found.append(copied(family, placed, showing(registry, dialect, placed), copy))
    return chain.from_iterable(found)


def combined_of(
    family: Family, found: Iterable[Copy[Shown]], merge: Merge[Shown]
) -> Iterator[tuple[Labels, Number | Shown] | None]:
    """What all engines have of ``family``, one a label set; None where a turn may be due."""
    groups: dict[Labels, list[Number | Shown]] = {}
    spent = 0
    for engine, _, names, children in found:
        for key, value in children:
            labels = labels_with(engine, family, names, key)
            groups.setdefault(tuple(sorted(labels.items())), []).append(value)
            spent += 1
            if not spent % AT_ONCE:
                yield None
    for pairs, values in groups.items():
        one = yield from merged(values, family.combine, merge)
        yield pairs, one
