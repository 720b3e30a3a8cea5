"""Text pages: Prometheus 0.0.4, and OpenMetrics 1.0, of which only headers and exemplars differ."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

from sidestep.catalog.buckets import Bounds
from sidestep.exposition.aggregate import aggregate_histograms
from sidestep.exposition.aggregated_series import AggregatedSeries, Labels
from sidestep.exposition.encoded_series import EncodedSeries, EncodedSums
from sidestep.exposition.engine_values import RegistryValues, Value, copied
from sidestep.exposition.families import Family, families
from sidestep.exposition.label_cache import LabelCache
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_format import (
    LABELS_PLACEHOLDER,
    header,
    histogram_template,
    label_text,
    with_exemplars,
)
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.registry import Registry

MAX_TEMPLATES = 64
"""Sets of bounds that a family can have at once; engines can send any bounds."""


def render(
    registry: Registry,
    series_filter: SeriesFilter | None = None,
    *,
    openmetrics: bool = False,
    names: Collection[str] = (),
) -> bytes:
    """Return the engines' page of this moment, without the closing line of OpenMetrics."""
    page = TextPage(series_filter, exemplars=openmetrics)
    values = copied(registry, with_gone=bool(page.series_filter.dropped_labels))
    return b"".join(page.write(values, openmetrics=openmetrics, names=names))


class TextPage:
    """Writes the families of engines as text.

    Args:
        series_filter: Labels and buckets to leave out.
        exemplars: Whether to write exemplars, which only OpenMetrics has.
    """

    def __init__(
        self, series_filter: SeriesFilter | None = None, *, exemplars: bool = False
    ) -> None:
        self.series_filter = series_filter or SeriesFilter()
        self._exemplars = exemplars
        self._labels: LabelCache[bytes] = LabelCache(lambda labels: label_text(labels).encode())
        self._aggregated = AggregatedSeries(self.series_filter.dropped_labels)
        self._families: dict[tuple[object, ...], FamilyText] = {}

    def write(
        self, values: RegistryValues, *, openmetrics: bool = False, names: Collection[str] = ()
    ) -> list[bytes]:
        """Return the page in parts: all families, or those that own one of the sample ``names``."""
        parts: list[bytes] = []
        for text in self.families(values, names):
            series = text.series.of(values)
            if any(series):
                parts.append(text.header(openmetrics=openmetrics))
                parts += series
        return parts

    def families(self, values: RegistryValues, names: Collection[str] = ()) -> list[FamilyText]:
        """Return the families of a page; keep nothing of engines and families that are gone."""
        self._labels.retain(values.engines)
        self._aggregated.retain(values)
        found = {family.form: family for family in families(values, names)}
        kept = {
            form: self._families.get(form) or self._made(family) for form, family in found.items()
        }
        if not names:
            self._families = kept
        return [*kept.values()]

    def _made(self, family: Family) -> FamilyText:
        writer = SeriesWriter(family, self.series_filter, exemplars=self._exemplars)
        if self.series_filter.dropped_labels or family.is_shared:
            return FamilyText(
                family,
                writer,
                EncodedSums(family, self._aggregated, aggregate_histograms, writer.text_of),
            )
        return FamilyText(family, writer, EncodedSeries(family, self._labels, writer.text))


class FamilyText(NamedTuple):
    """The text of one family."""

    family: Family
    writer: SeriesWriter
    series: EncodedSeries | EncodedSums

    def header(self, *, openmetrics: bool) -> bytes:
        """Return the HELP and TYPE lines."""
        found = self.family
        return header(found.name, found.kind, found.help, openmetrics=openmetrics).encode()


@functools.lru_cache(maxsize=100_000)
def _pairs(labels: Labels) -> bytes:
    return label_text(dict(labels)).encode()


class SeriesWriter:
    """Writes the series of one family.

    Args:
        family: The family.
        series_filter: Buckets to leave out.
        exemplars: Whether to write exemplars.
    """

    def __init__(
        self, family: Family, series_filter: SeriesFilter, *, exemplars: bool = False
    ) -> None:
        self._name = family.name
        self._kind = family.kind
        self._filter = series_filter
        self._has_exemplars = exemplars and family.kind == "histogram"
        self._templates: dict[Bounds, tuple[bytes, Sequence[int] | None]] = {}
        self._last: tuple[Bounds | None, bytes, Sequence[int] | None] = None, b"", None
        # %a formats as repr does.
        self._labelled = f"{self._name}{{%b}} %a\n".encode()
        self._bare = f"{self._name} %a\n".encode()

    def text(self, labels: bytes, value: Value, _created: float = 0.0) -> bytes:
        """Return the lines of one series."""
        if isinstance(value, Histogram):
            return self._histogram(labels, value)
        return self._labelled % (labels, value) if labels else self._bare % value

    def text_of(self, labels: Labels, value: Value, _created: float = 0.0) -> bytes:
        """Return the lines of one series."""
        return self.text(_pairs(labels), value)

    def samples(self, value: Value) -> int:
        """Return the number of lines of one series."""
        if not isinstance(value, Histogram):
            return 1
        _, shown = self._template(value.bounds)
        return 2 + len(value.counts if shown is None else shown)

    def _histogram(self, labels: bytes, value: Histogram) -> bytes:
        # Nearly all engines have the same bounds.
        bounds, template, buckets = self._last
        if value.bounds is not bounds:
            template, buckets = self._template(value.bounds)
            self._last = value.bounds, template, buckets
        counts = shown = [*accumulate(value.counts)]
        if buckets is not None:
            shown = [counts[place] for place in buckets]
        lines = (template % (*shown, counts[-1], value.sum)).replace(LABELS_PLACEHOLDER, labels)
        if not labels:
            lines = lines.replace(b"{}", b"").replace(b"{,", b"{")
        if value.exemplars and self._has_exemplars:
            return with_exemplars(lines, value.exemplars, buckets or range(len(counts)))
        return lines

    def _template(self, bounds: Bounds) -> tuple[bytes, Sequence[int] | None]:
        """Return the template of histograms with these bounds, and the buckets to show in it."""
        found = self._templates.get(bounds)
        if found is None:
            # A histogram without bounds has one bucket: the aggregate of engines without a common
            # bound. A summary has none.
            shown = self._filter.shown_bounds(self._name, bounds) if bounds else None
            places = None if shown is None else (*shown, len(bounds))
            if self._kind == "summary":
                places = ()
            kept = bounds if shown is None else tuple(bounds[place] for place in shown)
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            template = histogram_template(self._name, self._kind, kept)
            found = self._templates[bounds] = template, places
        return found
