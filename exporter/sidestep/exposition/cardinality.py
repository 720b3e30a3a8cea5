"""Cardinality report: series and samples by family, engine and label."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from sidestep.catalog.model import Kind
from sidestep.exposition.aggregate import aggregate_states
from sidestep.exposition.aggregated_series import AggregatedSeries
from sidestep.exposition.families import Family, families, is_shared, series_labels
from sidestep.exposition.family_snapshot import histogram_state, snapshot_family
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.exposition.sections import SeriesWriter
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_page import TextPage
from sidestep.metrics.registry import Registry

SLICE = 50
"""Series to count before yielding to the event loop."""


@dataclasses.dataclass
class Count:
    """Series (a histogram is one) and samples (lines of a page)."""

    series: int = 0
    samples: int = 0

    def add(self, samples: int) -> None:
        """Count one series."""
        self.series += 1
        self.samples += samples

    def json(self, **more: Any) -> dict[str, Any]:
        """Return the counts for JSON."""
        return {**more, "series": self.series, "samples": self.samples}


@dataclasses.dataclass
class CardinalityReport:
    """Cardinality of the engines' series, before any are dropped or thinned.

    Attributes:
        families: Kind and count by name.
        engines: Count by engine identity.
        labels: By label name: series that have the label, and its values.
        other: Samples of passthrough families, by name.
        pages: Counts of the pages under the present settings, by view.
    """

    total: Count = dataclasses.field(default_factory=Count)
    families: dict[str, tuple[Kind, Count]] = dataclasses.field(default_factory=dict)
    engines: dict[str, Count] = dataclasses.field(default_factory=dict)
    labels: dict[str, tuple[Count, set[str]]] = dataclasses.field(default_factory=dict)
    other: dict[str, int] = dataclasses.field(default_factory=dict)
    pages: dict[str, Count] = dataclasses.field(default_factory=dict)

    def add(self, family: Family, labels: Mapping[str, str], samples: int) -> None:
        """Count one series."""
        self.total.add(samples)
        self.families.setdefault(family.name, (family.kind, Count()))[1].add(samples)
        for label, text in labels.items():
            count, values = self.labels.setdefault(label, (Count(), set()))
            count.add(samples)
            values.add(text)

    def json(self) -> dict[str, Any]:
        """Return the report for JSON, highest counts first."""

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


def count_series(
    registry: Registry, passthrough: PassthroughRegistry, views: Mapping[str, TextPage]
) -> Iterator[CardinalityReport]:
    """Yield the report so far, to yield to the event loop, and at last the whole report.

    Args:
        registry: The series to count.
        passthrough: Other exporters' families.
        views: Pages by name, whose samples are counted as well.
    """
    found = CardinalityReport(engines={name: Count() for name in registry.engines})
    aggregated = AggregatedSeries(registry)
    for family in list(families(registry)):
        if is_shared(family):
            writer = SeriesWriter(family, SeriesFilter())
            for one in aggregated.series(family, histogram_state, aggregate_states):
                if one is None:
                    yield found
                else:
                    found.add(family, dict(one[0]), writer.samples(one[1]))
        else:
            yield from _of_engines(registry, family, found)
    for passed in passthrough.families():
        found.other[passed.name] = sum(len(part.samples) for part in passed.parts)
        yield found
    for view, page in views.items():
        count = found.pages.setdefault(view, Count())
        for text in page.families():
            for value in text.values():
                if value is None:
                    yield found
                else:
                    count.add(text.writer.samples(value))
            yield found
    yield found


def _of_engines(
    registry: Registry, family: Family, found: CardinalityReport
) -> Iterator[CardinalityReport]:
    writer = SeriesWriter(family, SeriesFilter())
    number = 0
    for engine, names, children in snapshot_family(registry, family, histogram_state):
        own = found.engines.setdefault(engine.id, Count())
        for key, value in children:
            samples = writer.samples(value)
            found.add(family, series_labels(engine, family, names, key), samples)
            own.add(samples)
            number += 1
            if not number % SLICE:
                yield found
    yield found
