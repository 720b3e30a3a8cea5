"""The series of each family of a page, with labels and values."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from sidestep.exposition.aggregated_series import AggregatedSeries, aggregate_native
from sidestep.exposition.engine_values import EngineValues, RegistryValues, Value
from sidestep.exposition.families import Family, families, series_labels


class Series(NamedTuple):
    """One series.

    Attributes:
        engine: The engine; None where several engines share the series.
    """

    labels: dict[str, str]
    value: Value
    engine: EngineValues | None = None


def family_series(
    values: RegistryValues,
    names: Collection[str] = (),
    dropped_labels: frozenset[str] = frozenset(),
) -> Iterator[tuple[Family, list[Series]]]:
    """Yield the families of engines and their series; a family can have none.

    Args:
        values: Values of all engines at one moment.
        names: Samples whose families are wanted; empty for all.
        dropped_labels: Labels to remove; series that become equal are aggregated.
    """
    aggregated = AggregatedSeries(dropped_labels)
    for family in families(values, names):
        if dropped_labels or family.is_shared:
            found = aggregated.series(values, family, aggregate_native)
            yield family, [Series(dict(labels), value) for labels, value in found]
        else:
            yield family, [*_single(values, family)]


def _single(values: RegistryValues, family: Family) -> Iterator[Series]:
    for engine in family.engines(values):
        names, children = family.children(engine)
        for key, value in children:
            yield Series(series_labels(engine, family, names, key), value, engine)
