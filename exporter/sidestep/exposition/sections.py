"""One dialect's part of a family as text, for values in slots.

A section first copies the values of all engines; then it writes them block by block, and the caller
may yield to the event loop between two blocks. Unchanged blocks are not written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import is_
from typing import NamedTuple, Protocol

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import Kind
from sidestep.exposition.block_cache import Block, changed_entries, updated
from sidestep.exposition.families import Family
from sidestep.exposition.family_snapshot import row_numbers
from sidestep.exposition.selection import LabelTexts, Selections, label_form
from sidestep.exposition.text_format import LABELS_PLACEHOLDER, histogram_template, series_text
from sidestep.metrics.engine import Engine, Key, Number
from sidestep.metrics.histogram import State

HISTOGRAMS_PER_BLOCK = 64
"""Histograms in a block: 5 us each to write."""
SCALARS_PER_BLOCK = 100
"""Numbers in a block: 0.1 us each to write, but 5 us after engines come or go."""
MAX_TEMPLATES = 64
"""Sets of bounds that a family can have at once; engines can send any bounds."""


class Section(Protocol):
    """Part of a family that caches its text."""

    def begin(self, selections: Selections) -> Iterator[bytes]:
        """Copy the present values; yield their text, empty ones to pause for the event loop."""


class HistogramTemplates:
    """Histogram templates of one family, by bounds."""

    def __init__(self, name: str, kind: Kind) -> None:
        self._name = name
        self._kind = kind
        self._known: dict[tuple[Bounds, bool], bytes] = {}
        self._last: Bounds | None = None
        self._text = b""

    def fill(self, pairs: bytes, state: State) -> bytes:
        """Return the lines of one histogram."""
        bounds, counts, total = state
        if bounds is not self._last or not pairs:
            self._text = self._of(bounds, labelled=bool(pairs))
            self._last = bounds if pairs else None
        counts = [*accumulate(counts)]
        # A summary has no buckets. A histogram without bounds has one: the aggregate of engines
        # without a common bound.
        shown = () if self._kind == "summary" else counts
        return (self._text % (*shown, counts[-1], total)).replace(LABELS_PLACEHOLDER, pairs)

    def _of(self, bounds: Bounds, *, labelled: bool) -> bytes:
        found = self._known.get((bounds, labelled))
        if found is None:
            if len(self._known) >= MAX_TEMPLATES:
                self._known.clear()
            found = histogram_template(self._name, self._kind, bounds, labelled=labelled)
            self._known[bounds, labelled] = found
        return found


class SlotSection:
    """Base of sections with values in slots: engines in blocks, with cached labels."""

    def __init__(
        self, family: Family, dialect: str, placed: SlotAssignment, labels: LabelTexts
    ) -> None:
        self.family = family
        self.dialect = dialect
        self.placed = placed
        self.slots = placed.slots
        self.keys = placed.label_values
        self._labels = labels
        self._form = label_form(placed)
        self._label_versions: Sequence[int] = ()

    def same(self, label_versions: Sequence[int]) -> bool:
        """Return whether the label versions are those of the last call."""
        if label_versions == self._label_versions:
            return True
        self._label_versions = label_versions
        return False

    def pairs(self, engine: Engine, key: Key) -> bytes:
        """Return the label text of a series."""
        names = self.placed.row.own_labels
        return self._labels.text(engine, self.family, self._form, names, key)


class _ScalarBlock:
    """Numbers of some engines, written by one template.

    Attributes:
        missing: Indexes of the slots without a value.
    """

    __slots__ = ("missing", "template", "text", "values")

    def __init__(self) -> None:
        self.values: Sequence[Number | None] | None = None
        self.missing: Sequence[int] | None = None
        self.template = self.text = b""


class ScalarSection(SlotSection):
    """Numbers, stored or computed: a block is a template with a placeholder for each value."""

    def __init__(
        self, family: Family, dialect: str, placed: SlotAssignment, labels: LabelTexts
    ) -> None:
        super().__init__(family, dialect, placed, labels)
        self._size = max(SCALARS_PER_BLOCK // len(self.keys), 1)
        self._blocks: dict[int, _ScalarBlock] = {}

    def begin(self, selections: Selections) -> Iterator[bytes]:
        """See ``Section``."""
        engines, label_versions = selections.of_row(self.dialect, self.placed)
        if not self.same(label_versions):
            self._blocks = {}
        return self._texts(engines, row_numbers(self.placed, engines), self._blocks)

    def _texts(
        self,
        engines: Sequence[Engine],
        values: Sequence[Number | None],
        blocks: dict[int, _ScalarBlock],
    ) -> Iterator[bytes]:
        size, width = self._size, len(self.keys)
        for start in range(0, len(engines), size):
            block = blocks.setdefault(start, _ScalarBlock())
            some = values[start * width : (start + size) * width]
            # The same object has the same text; 1 and 1.0 are equal but have different text.
            if block.values is None or not all(map(is_, some, block.values)):
                self._write(block, engines[start : start + size], some)
            yield block.text

    def _write(
        self, block: _ScalarBlock, engines: Sequence[Engine], values: Sequence[Number | None]
    ) -> None:
        missing = [place for place, value in enumerate(values) if value is None]
        if missing != block.missing:
            block.template = self._template(engines, values)
            block.missing = missing
        per = self.placed.row.unit_divisor
        shown = [value for value in values if value is not None] if missing else values
        if per != 1:
            shown = [value / per for value in shown if value is not None]
        # The text first: on an error, new values with the old text would count as written.
        block.text = block.template % (*shown,)
        block.values = values

    def _template(self, engines: Sequence[Engine], values: Sequence[Number | None]) -> bytes:
        name = self.family.name
        places = [(engine, key) for engine in engines for key in self.keys]
        lines = [
            series_text(name, self.pairs(*place).decode())
            for place, value in zip(places, values, strict=True)
            if value is not None
        ]
        # %a formats as repr does.
        return "".join([line.replace("%", "%%") + "%a\n" for line in lines]).encode()


class _BlockUpdate(NamedTuple):
    """A cached block of histograms, their present versions, and copies of the changed ones."""

    start: int
    before: Block | None
    versions: Sequence[object]
    states: Mapping[int, State | None]


class HistogramSection(SlotSection):
    """Histograms in slots; a version object distinguishes the states of each."""

    def __init__(
        self, family: Family, dialect: str, placed: SlotAssignment, labels: LabelTexts
    ) -> None:
        super().__init__(family, dialect, placed, labels)
        self._size = max(HISTOGRAMS_PER_BLOCK // len(self.slots), 1)
        self._templates = HistogramTemplates(family.name, family.kind)
        self._blocks: dict[int, Block] = {}
        self._pairs: dict[int, Sequence[bytes]] = {}

    def begin(self, selections: Selections) -> Iterator[bytes]:
        """See ``Section``."""
        engines, label_versions = selections.of_row(self.dialect, self.placed)
        if not self.same(label_versions):
            self._blocks, self._pairs = {}, {}
        jobs: list[_BlockUpdate] = []
        # One object for all states of this moment: a change removes it.
        mark = object()
        for start in range(0, len(engines), self._size):
            some = engines[start : start + self._size]
            found = [slots[slot] for e in some for slots in (e.histograms,) for slot in self.slots]
            versions = [
                None if one is None else one.state_token or one.token(mark) for one in found
            ]
            before = self._blocks.get(start)
            states = {
                place: None
                if (one := found[place]) is None
                else (one.bounds, [*one.counts], one.sum)
                for place in changed_entries(before, versions)
            }
            jobs.append(_BlockUpdate(start, before, versions, states))
        return self._texts(engines, jobs, self._blocks, self._pairs)

    def _texts(
        self,
        engines: Sequence[Engine],
        jobs: Sequence[_BlockUpdate],
        blocks: dict[int, Block],
        known: dict[int, Sequence[bytes]],
    ) -> Iterator[bytes]:
        fill = self._templates.fill
        for start, before, versions, states in jobs:
            block = before
            if states or block is None:
                pairs = known.get(start)
                if pairs is None:
                    some = engines[start : start + self._size]
                    pairs = known[start] = [self.pairs(e, key) for e in some for key in self.keys]
                texts = {
                    place: b"" if state is None else fill(pairs[place], state)
                    for place, state in states.items()
                }
                block = blocks[start] = updated(before, versions, texts)
            yield block.text
