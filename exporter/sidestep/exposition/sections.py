"""Text of a family's series, by dialect.

A section first copies values; then it writes them in steps, between which the caller may yield to
the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.layout import SlotAssignment
from sidestep.exposition.families import Family
from sidestep.exposition.family_snapshot import (
    EngineSnapshot,
    Values,
    histogram_state,
    slot_values,
    snapshot_engines,
)
from sidestep.exposition.label_cache import PER_BATCH, LabelCache, label_form
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_format import (
    LABELS_PLACEHOLDER,
    histogram_template,
    series_text,
    with_exemplars,
)
from sidestep.metrics.engine import Engine, Number
from sidestep.metrics.histogram import State

SERIES_PER_STEP = 64
"""Series to write before yielding to the event loop: 5 us each, if they are histograms."""
MAX_TEMPLATES = 64
"""Sets of bounds that a family can have at once; engines can send any bounds."""


class SeriesWriter:
    """Writes the series of one family as text.

    Args:
        family: The family.
        series_filter: Buckets to leave out.
        exemplars: Whether to write exemplars, which only OpenMetrics has.
    """

    def __init__(
        self, family: Family, series_filter: SeriesFilter, *, exemplars: bool = False
    ) -> None:
        self._name = family.name
        self._kind = family.kind
        self._filter = series_filter
        self._has_exemplars = exemplars and family.kind == "histogram"
        self._known: dict[tuple[Bounds, bool], tuple[bytes, Sequence[int] | None]] = {}
        self._last: Bounds | None = None
        self._template = b""
        self._buckets: Sequence[int] | None = None

    def text(self, labels: bytes, value: Number | State) -> bytes:
        """Return the lines of one series."""
        if isinstance(value, tuple):
            return self.histogram(labels, value)
        # %a formats as repr does.
        return b"%b%a\n" % (self.prefix(labels), value)

    def prefix(self, labels: bytes) -> bytes:
        """Return the text before a number."""
        return series_text(self._name, labels.decode()).encode()

    def histogram(self, labels: bytes, state: State) -> bytes:
        """Return the lines of one histogram or summary."""
        bounds, counts, total, exemplars = state
        if bounds is not self._last or not labels:
            self._template, self._buckets = self._form(bounds, labelled=bool(labels))
            self._last = bounds if labels else None
        counts = shown = [*accumulate(counts)]
        if self._buckets is not None:
            shown = [counts[place] for place in self._buckets]
        lines = (self._template % (*shown, counts[-1], total)).replace(LABELS_PLACEHOLDER, labels)
        if exemplars and self._has_exemplars:
            return with_exemplars(lines, exemplars, self._buckets or range(len(counts)))
        return lines

    def samples(self, value: Number | State) -> int:
        """Return the number of lines of one series."""
        if not isinstance(value, tuple):
            return 1
        _, shown = self._form(value[0], labelled=True)
        return 2 + len(value[1] if shown is None else shown)

    def _form(self, bounds: Bounds, *, labelled: bool) -> tuple[bytes, Sequence[int] | None]:
        """Return the template of histograms with these bounds, and the buckets to show in it."""
        found = self._known.get((bounds, labelled))
        if found is None:
            # A histogram without bounds has one bucket: the aggregate of engines without a common
            # bound. A summary has none.
            shown = self._filter.shown_bounds(self._name, bounds) if bounds else None
            places = None if shown is None else (*shown, len(bounds))
            if self._kind == "summary":
                places = ()
            kept = bounds if shown is None else tuple(bounds[place] for place in shown)
            if len(self._known) >= MAX_TEMPLATES:
                self._known.clear()
            template = histogram_template(self._name, self._kind, kept, labelled=labelled)
            found = self._known[bounds, labelled] = template, places
        return found


class NumberSection:
    """One dialect's numbers in slots.

    They are always written: a template with a placeholder for each number is faster than a cache.
    """

    def __init__(
        self,
        family: Family,
        placed: SlotAssignment,
        labels: LabelCache[bytes],
        writer: SeriesWriter,
    ) -> None:
        self._family = family
        self._placed = placed
        self._labels = labels
        self._writer = writer
        self._label_versions: Sequence[int] = ()
        self._templates: dict[int, tuple[Sequence[int], bytes]] = {}
        """By index of the first engine: indexes without a sample, and the template of all others."""

    def begin(self, engines: Sequence[Engine]) -> Iterator[list[bytes]]:
        """Copy the present values; yield their texts in steps."""
        label_versions = [engine.label_version for engine in engines]
        if label_versions != self._label_versions:
            self._label_versions, self._templates = label_versions, {}
        values = slot_values(self._placed, engines, histogram_state)
        return self._written(engines, values, self._templates)

    def _written(
        self,
        engines: Sequence[Engine],
        values: Values[State],
        templates: dict[int, tuple[Sequence[int], bytes]],
    ) -> Iterator[list[bytes]]:
        width = len(self._placed.label_values)
        count = max(SERIES_PER_STEP // width, 1)
        for start in range(0, len(engines), count):
            some = values[start * width : (start + count) * width]
            missing = [place for place, value in enumerate(some) if value is None]
            known = templates.get(start)
            if known is None or known[0] != missing:
                template = self._template(engines[start : start + count], missing)
                known = templates[start] = missing, template
            yield [known[1] % (*[value for value in some if value is not None],)]

    def _template(self, engines: Sequence[Engine], missing: Sequence[int]) -> bytes:
        form, placed = label_form(self._placed), self._placed
        names, keys = placed.row.own_labels, placed.label_values
        labels = [
            one
            for engine in engines
            for one in self._labels.get(engine, self._family, form, names, keys)
        ]
        lines = [
            self._writer.prefix(one).replace(b"%", b"%%") + b"%a\n"
            for place, one in enumerate(labels)
            if place not in missing
        ]
        return b"".join(lines)


class Section:
    """One dialect's histograms or open values, or a family that engines described themselves.

    The text of an engine is cached until the engine changes.
    """

    def __init__(
        self,
        family: Family,
        placed: SlotAssignment | None,
        labels: LabelCache[bytes],
        writer: SeriesWriter,
    ) -> None:
        self._family = family
        self._placed = placed
        self._labels = labels
        self._writer = writer
        self._form = label_form(placed)
        self._label_versions: Sequence[int] = ()
        self._versions: Sequence[int | None] = ()
        self._texts: list[bytes] = []
        self._pairs: dict[int, Sequence[bytes]] = {}
        """Labels of the histograms in slots, by label version of the engine."""

    def begin(self, engines: Sequence[Engine]) -> Iterator[list[bytes]]:
        """Copy the present values; yield their texts, at times none, in steps."""
        label_versions = [engine.label_version for engine in engines]
        if label_versions != self._label_versions:
            self._label_versions, self._pairs = label_versions, {}
            self._versions, self._texts = [None] * len(engines), [b""] * len(engines)
        versions = [engine.version for engine in engines]
        pairs = enumerate(zip(versions, self._versions, strict=True))
        changed = [place for place, (version, before) in pairs if version != before]
        stale = [engines[place] for place in changed]
        if self._placed is not None and self._placed.storage == "histogram":
            values = slot_values(self._placed, stale, histogram_state)
            written = self._histograms(self._placed, stale, values, self._pairs)
        else:
            snapshots = snapshot_engines(self._family, self._placed, stale, histogram_state)
            written = self._open_values(snapshots)
        return self._updated(label_versions, versions, self._texts.copy(), changed, written)

    def _updated(
        self,
        label_versions: Sequence[int],
        versions: Sequence[int],
        texts: list[bytes],
        changed: Iterable[int],
        written: Iterable[list[bytes]],
    ) -> Iterator[list[bytes]]:
        places = iter(changed)
        for some in written:
            for text, place in zip(some, places, strict=False):
                texts[place] = text
            yield []
        # Another page may have begun after labels changed.
        if label_versions == self._label_versions:
            self._versions, self._texts = versions, texts
        yield texts

    def _histograms(
        self,
        placed: SlotAssignment,
        engines: Sequence[Engine],
        values: Values[State],
        known: dict[int, Sequence[bytes]],
    ) -> Iterator[list[bytes]]:
        """Yield the histogram texts of some engines at a time."""
        names, keys = placed.row.own_labels, placed.label_values
        width = len(keys)
        count = max(SERIES_PER_STEP // width, 1)
        write = self._writer.histogram
        for start in range(0, len(engines), count):
            some = values[start * width : (start + count) * width]
            pairs: list[bytes] = []
            for engine in engines[start : start + count]:
                of_engine = known.get(engine.label_version)
                if of_engine is None:
                    of_engine = self._labels.get(engine, self._family, self._form, names, keys)
                    known[engine.label_version] = of_engine
                pairs += of_engine
            texts = [
                write(labels, value) if isinstance(value, tuple) else b""
                for labels, value in zip(pairs, some, strict=True)
            ]
            if width > 1:
                texts = [b"".join(texts[at : at + width]) for at in range(0, len(texts), width)]
            yield texts

    def _open_values(self, snapshots: Iterable[EngineSnapshot[State]]) -> Iterator[list[bytes]]:
        """Yield the text of one engine at a time, at times none in between."""
        spent = 0
        for snapshot in snapshots:
            lines: list[bytes] = []
            for batch in self._labels.batches(self._family, self._form, snapshot):
                lines += [self._writer.text(*one) for one in batch]
                spent += len(batch)
                if spent >= PER_BATCH:
                    yield []
                    spent = 0
            yield [b"".join(lines)]
