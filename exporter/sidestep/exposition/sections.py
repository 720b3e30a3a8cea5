"""A dialect's part of a family as text: what engines keep in slots, and whatever else they have.

A section first copies what it is to show, for all engines at once; then it writes, a block of them
at a time, and the loop may have its turn between two blocks. What has not changed since it was
written last is not written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import is_
from typing import NamedTuple, Protocol

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import Kind
from sidestep.exposition.block_cache import Block, changed, renewed
from sidestep.exposition.families import Family
from sidestep.exposition.family_snapshot import numbers_of
from sidestep.exposition.selection import LabelTexts, Rosters, form_of
from sidestep.exposition.text_format import PLACE, frame, series_text
from sidestep.metrics.engine import Engine, Key, Number
from sidestep.metrics.histogram import State

HISTOGRAMS = 64
"""In a block: 5 us each to write."""
SCALARS = 100
"""In a block: 0.1 us each, but 5 us as soon as engines come or go."""
FRAMES = 64
"""Bounds that a family can have at once: engines can bring any."""


class Section(Protocol):
    """A part of a family that keeps its texts."""

    def begin(self, rosters: Rosters) -> Iterator[bytes]:
        """Copy what there is now; the texts are made as they are taken, nothing where a turn is due."""


class Frames:
    """The frames of one family, by bounds."""

    def __init__(self, name: str, kind: Kind) -> None:
        self._name = name
        self._kind = kind
        self._known: dict[tuple[Bounds, bool], bytes] = {}
        self._last: Bounds | None = None
        self._text = b""

    def fill(self, pairs: bytes, state: State) -> bytes:
        """The lines of one histogram."""
        bounds, counts, total = state
        if bounds is not self._last or not pairs:
            self._text = self._of(bounds, labelled=bool(pairs))
            self._last = bounds if pairs else None
        counts = [*accumulate(counts)]
        # A summary shows no bucket. A histogram without bounds shows one: several engines' that
        # have no bound in common.
        shown = () if self._kind == "summary" else counts
        return (self._text % (*shown, counts[-1], total)).replace(PLACE, pairs)

    def _of(self, bounds: Bounds, *, labelled: bool) -> bytes:
        found = self._known.get((bounds, labelled))
        if found is None:
            if len(self._known) >= FRAMES:
                self._known.clear()
            found = frame(self._name, self._kind, bounds, labelled=labelled)
            self._known[bounds, labelled] = found
        return found


class Slots:
    """What sections of slots have in common: blocks of engines, of which the labels are kept."""

    def __init__(
        self, family: Family, dialect: str, placed: SlotAssignment, labels: LabelTexts
    ) -> None:
        self.family = family
        self.dialect = dialect
        self.placed = placed
        self.slots = placed.slots
        self.keys = placed.label_values
        self._labels = labels
        self._form = form_of(placed)
        self._looks: Sequence[int] = ()

    def same(self, looks: Sequence[int]) -> bool:
        """Whether engines look as they did the last time."""
        if looks == self._looks:
            return True
        self._looks = looks
        return False

    def pairs(self, engine: Engine, key: Key) -> bytes:
        """The text of a child's labels."""
        names = self.placed.row.own_labels
        return self._labels.of(engine, self.family, self._form, names, key)


class _ScalarBlock:
    """Values of some engines, written by one template.

    Attributes:
        missing: Places of the slots without a value.
    """

    __slots__ = ("missing", "template", "text", "values")

    def __init__(self) -> None:
        self.values: Sequence[Number | None] | None = None
        self.missing: Sequence[int] | None = None
        self.template = self.text = b""


class ScalarSection(Slots):
    """Plain numbers, kept or computed for a page: the static text of a block has a place for each."""

    def __init__(
        self, family: Family, dialect: str, placed: SlotAssignment, labels: LabelTexts
    ) -> None:
        super().__init__(family, dialect, placed, labels)
        self._size = max(SCALARS // len(self.keys), 1)
        self._blocks: dict[int, _ScalarBlock] = {}

    def begin(self, rosters: Rosters) -> Iterator[bytes]:
        """See ``Section``."""
        engines, looks = rosters.of(self.dialect, self.placed)
        if not self.same(looks):
            self._blocks = {}
        return self._texts(engines, numbers_of(self.placed, engines), self._blocks)

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
            # What is the same object has the same text; 1 and 1.0 are equal and have not.
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
        # The text first: values without theirs would pass for written.
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
        # %a is what repr has.
        return "".join([line.replace("%", "%%") + "%a\n" for line in lines]).encode()


class _Job(NamedTuple):
    """A block of histograms as it was, what they are now, and copies of those that have changed."""

    start: int
    before: Block | None
    marks: Sequence[object]
    states: Mapping[int, State | None]


class HistogramSection(Slots):
    """Histograms in slots, each told from its earlier states by its mark."""

    def __init__(
        self, family: Family, dialect: str, placed: SlotAssignment, labels: LabelTexts
    ) -> None:
        super().__init__(family, dialect, placed, labels)
        self._size = max(HISTOGRAMS // len(self.slots), 1)
        self._frames = Frames(family.name, family.kind)
        self._blocks: dict[int, Block] = {}
        self._pairs: dict[int, Sequence[bytes]] = {}

    def begin(self, rosters: Rosters) -> Iterator[bytes]:
        """See ``Section``."""
        engines, looks = rosters.of(self.dialect, self.placed)
        if not self.same(looks):
            self._blocks, self._pairs = {}, {}
        jobs: list[_Job] = []
        # One for all of this moment: whatever changes later has none, and gets another.
        mark = object()
        for start in range(0, len(engines), self._size):
            some = engines[start : start + self._size]
            found = [kept[slot] for e in some for kept in (e.histograms,) for slot in self.slots]
            marks = [None if one is None else one.state_token or one.token(mark) for one in found]
            before = self._blocks.get(start)
            states = {
                place: None
                if (one := found[place]) is None
                else (one.bounds, [*one.counts], one.sum)
                for place in changed(before, marks)
            }
            jobs.append(_Job(start, before, marks, states))
        return self._texts(engines, jobs, self._blocks, self._pairs)

    def _texts(
        self,
        engines: Sequence[Engine],
        jobs: Sequence[_Job],
        blocks: dict[int, Block],
        known: dict[int, Sequence[bytes]],
    ) -> Iterator[bytes]:
        fill = self._frames.fill
        for start, before, marks, states in jobs:
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
                block = blocks[start] = renewed(before, marks, texts)
            yield block.text
