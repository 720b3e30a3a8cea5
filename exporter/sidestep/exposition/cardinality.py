"""Cardinality report: series and samples by family, engine and label."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from sidestep.exposition.engine_values import RegistryValues
from sidestep.exposition.family_series import family_series
from sidestep.exposition.passthrough.registry import PassthroughFamily
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_page import SeriesWriter, TextPage


@dataclasses.dataclass(slots=True)
class Count:
    """Series (a histogram is one) and samples (lines of a page)."""

    series: int = 0
    samples: int = 0

    def add(self, samples: int) -> None:
        """Count one series."""
        self.series += 1
        self.samples += samples


def cardinality_report(
    values: RegistryValues,
    passthrough: Iterable[PassthroughFamily],
    views: Mapping[str, TextPage],
) -> dict[str, Any]:
    """Return the report for JSON, highest counts first.

    Engines' series are counted before any are dropped or thinned, and pages under the present settings.
    """
    total, families, by_view = Count(), [], {}
    engines = {engine.id: Count() for engine in values.engines}
    labels: defaultdict[str, tuple[Count, set[str]]] = defaultdict(lambda: (Count(), set()))
    for family, series in family_series(values):
        writer, count = SeriesWriter(family, SeriesFilter()), Count()
        for one in series:
            samples = writer.samples(one.value)
            counts = [total, count]
            if one.engine is not None:
                counts.append(engines[one.engine.id])
            for label, text in one.labels.items():
                of_label, texts = labels[label]
                counts.append(of_label)
                texts.add(text)
            for each in counts:
                each.add(samples)
        if series:
            families.append(_json(count, name=family.name, type=family.kind))
    for view, page in views.items():
        by_view[view] = count = Count()
        for family, series in family_series(
            values, dropped_labels=page.series_filter.dropped_labels
        ):
            writer = SeriesWriter(family, page.series_filter)
            for one in series:
                count.add(writer.samples(one.value))
    return {
        **_json(total),
        "pages": {view: _json(count) for view, count in by_view.items()},
        "families": _sorted(families),
        "engines": _sorted(_json(count, id=name) for name, count in engines.items()),
        "labels": _sorted(
            _json(count, name=name, values=len(texts)) for name, (count, texts) in labels.items()
        ),
        "passed_on": _sorted(
            {"name": each.name, "samples": len(each.samples)} for each in passthrough
        ),
    }


def _json(count: Count, **more: Any) -> dict[str, Any]:
    return {**more, "series": count.series, "samples": count.samples}


def _sorted(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda one: (-one["samples"], str(one)))
