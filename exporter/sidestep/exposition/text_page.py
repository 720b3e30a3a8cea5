"""Text pages: Prometheus 0.0.4, and OpenMetrics 1.0, of which only headers and exemplars differ."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

from prometheus_client.utils import floatToGoString

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.row import Kind
from sidestep.exposition.aggregated_series import Labels, aggregate_histograms
from sidestep.exposition.encoded_series import EncodedFamilies
from sidestep.exposition.engine_values import RegistryValues, Value
from sidestep.exposition.families import Family
from sidestep.exposition.passthrough.parser import ESCAPES, timestamp_in_seconds
from sidestep.exposition.passthrough.registry import PassthroughFamily
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.metrics.exemplars import Exemplar, Exemplars
from sidestep.metrics.histogram import Histogram

LABELS_PLACEHOLDER = b"\0"
"""Stands for the labels in a histogram's lines; no name and no bound has such a byte."""


def header(name: str, kind: str, text: str, *, openmetrics: bool) -> str:
    """Return HELP and TYPE lines; OpenMetrics names a counter's family without its suffix."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    if openmetrics:
        escaped = escaped.replace('"', '\\"')
        if kind == "counter" and name.endswith("_total"):
            name = name.removesuffix("_total")
        elif kind == "counter":
            # OpenMetrics has no counters without the suffix; this keeps the name.
            kind = "unknown"
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n"


def label_text(labels: Labels) -> bytes:
    """Return ``a="x",b="y"`` with escapes."""
    return ",".join([f'{name}="{value.translate(ESCAPES)}"' for name, value in labels]).encode()


def bound_text(bound: float) -> str:
    """Format ``le`` as the engines and Go do: ``0.5``, ``1e+06``."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


def histogram_template(name: str, kind: Kind, bounds: Bounds) -> bytes:
    """Return a histogram's lines with a placeholder for each value and for the labels.

    The values: cumulative counts (none for a summary), the number of observations, their sum.

    All histograms with this name and these bounds share the template: inserting labels takes a
    tenth of the time of inserting values, and a template per series would need as much memory as
    the page.
    """
    index = LABELS_PLACEHOLDER.decode()
    outer = f"{{{index}}}"
    lines = [f"{name}_count{outer} %d\n", f"{name}_sum{outer} %a\n"]
    if kind != "summary":
        les = [*(bound_text(bound) for bound in bounds), "+Inf"]
        lines[:0] = [f'{name}_bucket{{{index},le="{le}"}} %d\n' for le in les]
    return "".join(lines).encode()


def with_exemplars(lines: bytes, exemplars: Exemplars, buckets: Sequence[int]) -> bytes:
    """Return a histogram's lines with its exemplars, as OpenMetrics has them.

    Args:
        lines: The lines, which begin with those of the buckets.
        exemplars: The exemplars; those of a bucket without a line go to the next one with a line.
        buckets: Indexes of the buckets that have lines, in the order of the lines.
    """
    of_line: dict[int, Exemplar] = {}
    for bucket, one in exemplars.items():
        line = bisect_left(buckets, bucket)
        if line not in of_line or of_line[line].time <= one.time:
            of_line[line] = one
    parts = lines.split(b"\n")
    for line, one in of_line.items():
        context = b'{trace_id="%b",span_id="%b"}' % (one.trace_id.encode(), one.span_id.encode())
        parts[line] += b" # %b %a %.3f" % (context, one.value, one.time)
    return b"\n".join(parts)


MAX_TEMPLATES = 64
"""Sets of bounds that a family can have at once; engines can send any bounds."""


class TextPage:
    """Writes the families of engines as text."""

    def __init__(
        self, series_filter: SeriesFilter | None = None, *, exemplars: bool = False
    ) -> None:
        self.series_filter = shown = series_filter or SeriesFilter()
        self._encoded = EncodedFamilies(
            label_text,
            lambda family: SeriesWriter(family, shown, exemplars=exemplars).text,
            aggregate_histograms,
            shown.dropped_labels,
        )

    def write(
        self, values: RegistryValues, *, openmetrics: bool = False, names: Collection[str] = ()
    ) -> list[bytes]:
        """Return the page in parts: all families, or those that own one of the sample ``names``."""
        parts: list[bytes] = []
        for one, series in self._encoded.of(values, names):
            parts.append(header(one.name, one.kind, one.help, openmetrics=openmetrics).encode())
            parts += series
        return parts


class SeriesWriter:
    """Writes the series of one family, with the buckets that the filter shows."""

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


def write_passed_on(
    families: Iterable[PassthroughFamily], *, openmetrics: bool = False
) -> list[bytes]:
    """Return families of other exporters as text."""
    parts: list[bytes] = []
    for family in families:
        if openmetrics and not family.is_openmetrics:
            continue
        kind: str = family.kind
        # OpenMetrics requires the suffix _total of counters, and calls untyped "unknown".
        if openmetrics and (
            kind == "untyped" or (kind == "counter" and not family.name.endswith("_total"))
        ):
            kind = "unknown"
        parts.append(header(family.name, kind, family.help, openmetrics=openmetrics).encode())
        shown = timestamp_in_seconds if openmetrics else bytes
        lines = [b"%b %b\n" % (series.text, shown(value)) for series, value in family.samples]
        parts.append(b"".join(lines))
    return parts
