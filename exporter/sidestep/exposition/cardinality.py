"""Cardinality report: series and samples by family, engine and label."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from sidestep.catalog.row import Kind
from sidestep.exposition.engine_values import RegistryValues
from sidestep.exposition.families import Family
from sidestep.exposition.family_series import family_series
from sidestep.exposition.passthrough.registry import PassthroughFamily
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_page import SeriesWriter, TextPage


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
    values: RegistryValues,
    passthrough: Iterable[PassthroughFamily],
    views: Mapping[str, TextPage],
) -> CardinalityReport:
    """Return the report.

    Args:
        values: The series to count.
        passthrough: Other exporters' families.
        views: Pages by name, whose samples are counted as well.
    """
    found = CardinalityReport(engines={engine.id: Count() for engine in values.engines})
    for family, series in family_series(values):
        writer = SeriesWriter(family, SeriesFilter())
        for one in series:
            samples = writer.samples(one.value)
            found.add(family, one.labels, samples)
            if one.engine is not None:
                found.engines[one.engine.id].add(samples)
    for passed in passthrough:
        found.other[passed.name] = len(passed.samples)
    for view, page in views.items():
        count = found.pages.setdefault(view, Count())
        dropped = page.series_filter.dropped_labels
        for family, series in family_series(values, dropped_labels=dropped):
            writer = SeriesWriter(family, page.series_filter)
            for one in series:
                count.add(writer.samples(one.value))
    return found
