"""Functions that read the values that an engine has of a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import Constant, Info, Kind
from sidestep.exposition.engine_values import EngineValues, Value
from sidestep.metrics.engine import Key
from sidestep.metrics.histogram import Histogram

Children = Sequence[tuple[Key, Value]]
"""Values by own label values."""
Reader = Callable[[EngineValues], tuple[Key, Children]]
"""Returns own label names, and values in the exposed unit."""


def row_reader(placed: SlotAssignment) -> Reader:
    """Return the reader of a row of the catalogue."""
    row, names, divisor = placed.row, placed.own_labels, placed.row.unit_divisor
    source = row.source
    if placed.storage == "sampled":
        # The senders of a catalogued family may have labels besides the row's.
        name = placed.stored_name
        return lambda engine: _open_children(engine, name)
    if placed.storage == "keyed":
        (slot,) = placed.slots
        return lambda engine: (names, _divided(engine.keyed[slot], divisor))
    if isinstance(source, Info):
        info = source.name
        return lambda engine: _info(engine.info.get(info))
    if isinstance(source, Constant):
        constant = (((), source.value),)
        return lambda _: (names, constant)
    if placed.storage == "computed":
        name = row.name
        return lambda engine: (names, _single((), engine.computed[name]))
    return _slot_reader(placed, names, divisor)


def described_reader(name: str, kind: Kind, labels: Key) -> Reader:
    """Return the reader of a family that engines described themselves.

    Two engines may describe one name differently; a page shows the first form.
    """

    def read(engine: EngineValues) -> tuple[Key, Children]:
        family = engine.open_families[name]
        if (family.kind, family.labels) != (kind, labels):
            return (), ()
        return _open_children(engine, name)

    return read


def _slot_reader(placed: SlotAssignment, names: Key, divisor: int) -> Reader:
    """Return the reader of a row whose values are in scalars or histograms."""
    slots, keys = placed.slots, placed.label_values
    if len(slots) > 1 or divisor != 1:
        children = dict(zip(keys, slots, strict=True))
        if placed.storage == "histogram":
            return lambda engine: (
                names,
                [
                    (key, one)
                    for key, slot in children.items()
                    if (one := engine.histograms[slot]) is not None
                ],
            )
        return lambda engine: (
            names,
            _divided(
                {
                    key: value
                    for key, slot in children.items()
                    if (value := engine.values[slot]) is not None
                },
                divisor,
            ),
        )
    (slot,), (key,) = slots, keys
    if placed.storage == "histogram":
        return lambda engine: (names, _single(key, engine.histograms[slot]))
    return lambda engine: (names, _single(key, engine.values[slot]))


def _single(key: Key, value: Value | None) -> Children:
    return () if value is None else ((key, value),)


def _divided(children: Mapping[Key, Value], divisor: int) -> Children:
    """Return values in a unit that is so many stored units; histograms have no other unit."""
    if divisor == 1:
        return [*children.items()]
    return [
        (key, value / divisor)
        for key, value in children.items()
        if not isinstance(value, Histogram)
    ]


def _info(labels: Mapping[str, str] | None) -> tuple[Key, Children]:
    return ((), ()) if labels is None else (tuple(labels), [(tuple(labels.values()), 1)])


def _open_children(engine: EngineValues, name: str) -> tuple[Key, Children]:
    family = engine.open_families[name]
    return family.labels, [*family.children.items()]
