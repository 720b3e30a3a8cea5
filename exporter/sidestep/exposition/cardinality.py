"""How many series pages have, and what makes them many: by family, engine and label."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from sidestep.catalog.model import Kind
from sidestep.exposition.aggregate import merged_states
from sidestep.exposition.aggregated_text import Merged
from sidestep.exposition.families import Family, families, is_shared, labels_with
from sidestep.exposition.family_snapshot import combined_of, copies, state_of
from sidestep.metrics.engine import Number
from sidestep.metrics.histogram import State
from sidestep.metrics.registry import Registry

SLICE = 50
"""Series between two turns of the loop."""


@dataclasses.dataclass
class Count:
    """Series, a histogram being one, and samples: the lines of a page."""

    series: int = 0
    samples: int = 0

    def add(self, value: Number | State) -> None:
        """One series more."""
        self.series += 1
        self.samples += samples_of(value)

    def json(self, **more: Any) -> dict[str, Any]:
        """For programs."""
        return {**more, "series": self.series, "samples": self.samples}


@dataclasses.dataclass
class Report:
    """What is there, before anything is dropped or thinned; of engines alone, but for ``other``.

    Attributes:
        families: By name: what it is, and how many it has.
        engines: By identity.
        labels: By name: the series that have the label, and its values.
        other: Samples of families that are passed on, by name.
        pages: What pages have under the present settings, by view.
    """

    total: Count = dataclasses.field(default_factory=Count)
    families: dict[str, tuple[Kind, Count]] = dataclasses.field(default_factory=dict)
    engines: dict[str, Count] = dataclasses.field(default_factory=dict)
    labels: dict[str, tuple[Count, set[str]]] = dataclasses.field(default_factory=dict)
    other: dict[str, int] = dataclasses.field(default_factory=dict)
    pages: dict[str, Count] = dataclasses.field(default_factory=dict)

    def add(self, name: str, kind: Kind, labels: dict[str, str], value: Number | State) -> None:
        """Count one series."""
        self.total.add(value)
        self.families.setdefault(name, (kind, Count()))[1].add(value)
        for label, text in labels.items():
            count, values = self.labels.setdefault(label, (Count(), set()))
            count.add(value)
            values.add(text)

    def json(self) -> dict[str, Any]:
        """For programs: the most comes first."""

        def most(found: list[dict[str, Any]], key: str = "samples") -> list[dict[str, Any]]:
            return sorted(found, key=lambda one: (-one[key], str(one)))

        return {
            **self.total.json(),
            "pages": {view: count.json() for view, count in self.pages.items()},
            "families": most(
                [count.json(name=name, type=kind) for name, (kind, count) in self.families.items()]
            ),
            "engines": most([count.json(id=name) for name, count in self.engines.items()]),
            "labels": most(
                [
                    count.json(name=name, values=len(values))
                    for name, (count, values) in self.labels.items()
                ]
            ),
            "passed_on": most([{"name": n, "samples": k} for n, k in self.other.items()]),
        }


def samples_of(value: Number | State) -> int:
    """Lines that a series has on a page; a summary has no bounds and no buckets."""
    if not isinstance(value, tuple):
        return 1
    bounds = value[0]
    return len(bounds) + 3 if bounds else 2


def counted(registry: Registry, views: Mapping[str, Merged]) -> Iterator[Report]:
    """What is counted so far, ever again, and at last all there is.

    Args:
        registry: What is counted.
        views: Pages by name, of which the samples are told, too.
    """
    found = Report(engines={name: Count() for name in registry.engines})
    for family in list(families(registry)):
        if is_shared(family):
            for one in combined_of(family, copies(registry, family, state_of), merged_states):
                if one is None:
                    yield found
                else:
                    found.add(family.name, family.kind, dict(one[0]), one[1])
        else:
            yield from _of_engines(registry, family, found)
    for passed in registry.passthrough.families():
        found.other[passed.name] = sum(len(part.series) for part in passed.shown)
        yield found
    for view, merged in views.items():
        merged.refresh()
        count = found.pages.setdefault(view, Count())
        for family in merged.families():
            for series in merged.series(family):
                if series is None:
                    yield found
                else:
                    count.series += 1
                    count.samples += merged.samples_of(family, series[1])
            yield found
    yield found


def _of_engines(registry: Registry, family: Family, found: Report) -> Iterator[Report]:
    number = 0
    for engine, _, names, children in copies(registry, family, state_of):
        own = found.engines.setdefault(engine.id, Count())
        for key, value in children:
            found.add(family.name, family.kind, labels_with(engine, family, names, key), value)
            own.add(value)
            number += 1
            if not number % SLICE:
                yield found
    yield found
