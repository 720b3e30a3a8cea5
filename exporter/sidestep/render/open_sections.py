"""Parts of families as text whose children come and go, or that several engines have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sidestep.catalogue.model import Constant, Info, Reading
from sidestep.combining import combined_numbers, combined_states
from sidestep.engine import Engine, Key, Number
from sidestep.histogram import State
from sidestep.plan import Placed
from sidestep.render.kept import Block, changed, renewed
from sidestep.render.rosters import LabelTexts, Rosters, form_of
from sidestep.render.sections import Frames
from sidestep.render.words import number, pairs_text, series_text
from sidestep.view import Copy, Family, copy_of, having, labels_with

ENGINES = 32
"""In a block."""
AT_ONCE = 50
"""Children that are written between two turns of the loop: a few microseconds each."""


class OpenSection:
    """Whatever is not in slots: an engine's part is kept until something of the engine changes.

    Args:
        dialect: Empty of families that described themselves: engines of all may have them.
        placed: None likewise.
    """

    def __init__(
        self, family: Family, dialect: str, placed: Placed | None, labels: LabelTexts
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
        jobs = []
        for start in range(0, len(engines), ENGINES):
            some = engines[start : start + ENGINES]
            marks = [self.mark(engine) for engine in some]
            before = self._blocks.get(start)
            copies = {place: copy_of(some[place], self._family) for place in changed(before, marks)}
            jobs.append((start, before, marks, copies))
        return self._texts(jobs, self._blocks)

    def engines(self, rosters: Rosters) -> Sequence[Engine]:
        """Those that have the family now; what was kept of others, or as they looked, goes."""
        family = self._family
        if self._placed is None:
            found = rosters.all(live=family.kind == "gauge").engines
            found = [engine for engine in found if family.name in engine.open]
        else:
            found = having(rosters.of(self._dialect, self._placed).engines, self._placed)
        looks = [engine.looks for engine in found]
        if looks != self._looks:
            self._looks, self._blocks = looks, {}
            kept = self._pairs.keys() & set(looks)
            self._pairs = {look: self._pairs[look] for look in kept}
        return found

    def mark(self, engine: Engine) -> object:
        """What the state is told by that ``engine`` has the family in."""
        source = None if self._placed is None else self._placed.row.source
        if isinstance(source, Reading):
            # It may be another whenever it is read.
            return object()
        return engine.looks if isinstance(source, Info | Constant) else engine.version

    def told(self, copy: Copy) -> Iterator[tuple[bytes, Number | State]]:
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
        self,
        jobs: Sequence[tuple[int, Block | None, Sequence[object], dict[int, Copy]]],
        blocks: dict[int, Block],
    ) -> Iterator[bytes]:
        spent = 0
        for start, before, marks, copies in jobs:
            block = before
            if copies or block is None:
                texts: dict[int, bytes] = {}
                for place, copy in copies.items():
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


class SharedSection:
    """A family in which engines can have the same labels: their series are combined."""

    def __init__(self, family: Family, labels: LabelTexts) -> None:
        self._family = family
        self._frames = Frames(family.name, family.kind)
        self._parts = [
            OpenSection(family, dialect, placed, labels)
            for dialect, placed in family.places.items()
        ]
        self._marks: Sequence[object] | None = None
        self._text = b""

    def begin(self, rosters: Rosters) -> Iterator[bytes]:
        """See ``Section``."""
        found = [(part, engine) for part in self._parts for engine in part.engines(rosters)]
        marks = [mark for part, one in found for mark in (one.looks, part.mark(one))]
        if marks == self._marks:
            return iter((self._text,))
        return self._texts(marks, [(part, copy_of(engine, self._family)) for part, engine in found])

    def _texts(
        self, marks: Sequence[object], copies: Sequence[tuple[OpenSection, Copy]]
    ) -> Iterator[bytes]:
        groups: dict[bytes, list[Number | State]] = {}
        spent = 0
        for part, copy in copies:
            for pairs, value in part.told(copy):
                groups.setdefault(pairs, []).append(value)
                spent += 1
                if spent >= AT_ONCE:
                    yield b""
                    spent = 0
        lines: list[bytes] = []
        for pairs, values in groups.items():
            lines.append(self._line(pairs, values))
            spent += len(values)
            if spent >= AT_ONCE:
                yield b""
                spent = 0
        self._marks, self._text = marks, b"".join(lines)
        yield self._text

    def _line(self, pairs: bytes, values: Sequence[Number | State]) -> bytes:
        family = self._family
        states = [value for value in values if isinstance(value, tuple)]
        if states:
            return self._frames.fill(pairs, combined_states(states))
        numbers = [value for value in values if not isinstance(value, tuple)]
        one = number(combined_numbers(numbers, family.combine))
        return f"{series_text(family.name, pairs.decode())}{one}\n".encode()
