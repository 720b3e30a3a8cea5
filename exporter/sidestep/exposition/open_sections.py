"""Parts of families as text whose children come and go, or that several engines have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import Computed, Constant, Info
from sidestep.exposition.aggregate import merged, merged_states, turning
from sidestep.exposition.block_cache import Block, changed, renewed
from sidestep.exposition.families import Family, having, labels_with
from sidestep.exposition.family_snapshot import Copy, copied, numbers_of, state_of
from sidestep.exposition.sections import Frames
from sidestep.exposition.selection import LabelTexts, Rosters, form_of
from sidestep.exposition.text_format import number, pairs_text, series_text
from sidestep.metrics.engine import Engine, Key, Number
from sidestep.metrics.histogram import State

ENGINES = 32
"""In a block."""
AT_ONCE = 50
"""Children that are written between two turns of the loop: a few microseconds each."""


class _Job(NamedTuple):
    """A block of engines as it was, by what their states of now are told, and which have changed."""

    start: int
    before: Block | None
    marks: Sequence[object]
    places: Sequence[int]


class OpenSection:
    """Whatever is not in slots: an engine's part is kept until something of the engine changes.

    Args:
        dialect: Empty of families that described themselves: engines of all may have them.
        placed: None likewise.
    """

    def __init__(
        self, family: Family, dialect: str, placed: SlotAssignment | None, labels: LabelTexts
    ) -> None:
        self._family = family
        self._dialect = dialect
        self._placed = placed
        self._labels = labels
        self._form = ("",) if placed is None else form_of(placed)
        self._frames = Frames(family.name, family.kind)
        self._looks: Sequence[int] = ()
        self._blocks: dict[int, Block] = {}
        self._pairs: dict[int, dict[Key, bytes]] = {}
        """By how the engine looks."""

    def begin(self, rosters: Rosters) -> Iterator[bytes]:
        """See ``Section``."""
        engines = self.engines(rosters)
        marks = self.marks(engines)
        jobs: list[_Job] = []
        stale: list[Engine] = []
        for start in range(0, len(engines), ENGINES):
            some = marks[start : start + ENGINES]
            before = self._blocks.get(start)
            places = changed(before, some)
            stale += [engines[start + place] for place in places]
            jobs.append(_Job(start, before, some, places))
        return self._texts(jobs, self.copied(stale), self._blocks)

    def copied(self, engines: Sequence[Engine]) -> Iterator[Copy[State]]:
        """What ``engines`` have of the family now."""
        return copied(self._family, self._placed, engines, state_of)

    def engines(self, rosters: Rosters) -> Sequence[Engine]:
        """Those that have the family now; what was kept of others, or as they looked, goes."""
        family = self._family
        if self._placed is None:
            found = rosters.all(live=family.kind == "gauge").engines
            found = [engine for engine in found if family.name in engine.open_families]
        else:
            found = having(rosters.of(self._dialect, self._placed).engines, self._placed)
        looks = [engine.label_version for engine in found]
        if looks != self._looks:
            self._looks, self._blocks = looks, {}
            kept = self._pairs.keys() & set(looks)
            self._pairs = {look: self._pairs[look] for look in kept}
        return found

    def marks(self, engines: Sequence[Engine]) -> Sequence[object]:
        """What the states are told by that ``engines`` have the family in."""
        placed = self._placed
        source = None if placed is None else placed.row.source
        if placed is not None and isinstance(source, Computed):
            return numbers_of(placed, engines)
        if isinstance(source, Info | Constant):
            return [engine.label_version for engine in engines]
        return [engine.version for engine in engines]

    def told(self, copy: Copy[State]) -> Iterator[tuple[bytes, Number | State]]:
        """Its children, by the text of their labels, which are kept as long as a child is there."""
        engine, looks, names, children = copy
        before, known = self._pairs.get(looks, {}), {}
        for key, value in children:
            if not key:
                # Other families have the same labels.
                yield self._labels.of(engine, self._family, self._form, names, key), value
                continue
            pairs = before.get(key)
            if pairs is None:
                pairs = pairs_text(labels_with(engine, self._family, names, key)).encode()
            known[key] = pairs
            yield pairs, value
        if known:
            self._pairs[looks] = known
        else:
            self._pairs.pop(looks, None)

    def _line(self, pairs: bytes, value: Number | State) -> bytes:
        if isinstance(value, tuple):
            return self._frames.fill(pairs, value)
        return f"{series_text(self._family.name, pairs.decode())}{value!r}\n".encode()

    def _texts(
        self, jobs: Sequence[_Job], copies: Iterator[Copy[State]], blocks: dict[int, Block]
    ) -> Iterator[bytes]:
        spent = 0
        for start, before, marks, places in jobs:
            block = before
            if places or block is None:
                texts: dict[int, bytes] = {}
                for place, copy in zip(places, copies, strict=False):
                    lines: list[bytes] = []
                    for pairs, value in self.told(copy):
                        lines.append(self._line(pairs, value))
                        spent += 1
                        if spent >= AT_ONCE:
                            yield b""
                            spent = 0
                    texts[place] = b"".join(lines)
                block = blocks[start] = renewed(before, marks, texts)
            yield block.text


_Share = Sequence[tuple[bytes, Number | State]]
"""What one engine has of a shared family, by the text of its labels."""
_Shares = Iterator[_Share | None]
"""Of one engine after the other; None where a turn is due."""


class _Told(NamedTuple):
    """What one engine has, and what its state is told by."""

    mark: object
    children: _Share


class _Part:
    """One dialect's part of a shared family: what its engines have is kept until it changes."""

    def __init__(self, section: OpenSection) -> None:
        self.section = section
        self.known: dict[int, _Told] = {}
        """By how an engine looks."""

    def begin(self, rosters: Rosters) -> tuple[Sequence[tuple[int, object]], _Shares]:
        """What the state of now is told by, and the parts that engines have in it."""
        engines = self.section.engines(rosters)
        looks = [engine.label_version for engine in engines]
        marks = [*zip(looks, self.section.marks(engines), strict=True)]
        before = [self._unchanged(*mark) for mark in marks]
        stale = [engine for engine, told in zip(engines, before, strict=True) if told is None]
        return marks, self._told(marks, before, self.section.copied(stale))

    def _unchanged(self, look: int, mark: object) -> _Told | None:
        """What is kept of an engine, where that is what it has now."""
        told = self.known.get(look)
        return None if told is None or told.mark != mark else told

    def _told(
        self,
        marks: Sequence[tuple[int, object]],
        before: Sequence[_Told | None],
        copies: Iterator[Copy[State]],
    ) -> _Shares:
        """One engine after the other, at last all of them are kept.

        Where there is nothing ``before`` the next of ``copies`` is the engine's. By how it looks
        now nobody could tell: it may have said hello since they were made.
        """
        known: dict[int, _Told] = {}
        for (look, mark), last in zip(marks, before, strict=True):
            told = last
            if told is None:
                children: list[tuple[bytes, Number | State]] = []
                for number, child in enumerate(self.section.told(next(copies)), start=1):
                    children.append(child)
                    if not number % AT_ONCE:
                        yield None
                told = _Told(mark, children)
            known[look] = told
            yield told.children
        self.known = known


class SharedSection:
    """A family in which engines can have the same labels: their series are combined."""

    def __init__(self, family: Family, labels: LabelTexts) -> None:
        self._family = family
        self._frames = Frames(family.name, family.kind)
        self._parts = [
            _Part(OpenSection(family, dialect, placed, labels))
            for dialect, placed in family.places.items()
        ]
        self._marks: Sequence[object] | None = None
        self._text = b""

    def begin(self, rosters: Rosters) -> Iterator[bytes]:
        """See ``Section``."""
        begun = [part.begin(rosters) for part in self._parts]
        marks = [mark for marks, _ in begun for mark in marks]
        if marks == self._marks:
            return iter((self._text,))
        return self._texts(marks, chain.from_iterable(shares for _, shares in begun))

    def _texts(self, marks: Sequence[object], shares: _Shares) -> Iterator[bytes]:
        groups: dict[bytes, list[Number | State]] = {}
        spent = 0
        for children in shares:
            for pairs, value in children or ():
                groups.setdefault(pairs, []).append(value)
            spent += 1 + len(children or ())
            if children is None or spent >= AT_ONCE:
                yield b""
                spent = 0
        lines: list[bytes] = []
        for pairs, values in groups.items():
            making = merged(values, self._family.combine, merged_states)
            value = yield from turning(making, b"")
            lines.append(self._line(pairs, value))
            spent += len(values)
            if spent >= AT_ONCE:
                yield b""
                spent = 0
        self._marks, self._text = marks, b"".join(lines)
        yield self._text

    def _line(self, pairs: bytes, value: Number | State) -> bytes:
        if isinstance(value, tuple):
            return self._frames.fill(pairs, value)
        return f"{series_text(self._family.name, pairs.decode())}{number(value)}\n".encode()
