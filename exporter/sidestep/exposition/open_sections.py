"""Parts of families as text whose series come and go, or that several engines share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import Computed, Constant, Info
from sidestep.exposition.aggregate import (
    aggregate_states,
    aggregate_values,
    run_yielding,
)
from sidestep.exposition.block_cache import Block, changed_entries, updated
from sidestep.exposition.families import (
    Family,
    engines_with_samples,
    series_labels,
)
from sidestep.exposition.family_snapshot import (
    EngineSnapshot,
    histogram_state,
    row_numbers,
    snapshot_engines,
)
from sidestep.exposition.sections import HistogramTemplates
from sidestep.exposition.selection import LabelTexts, Selections, label_form
from sidestep.exposition.text_format import (
    format_number,
    label_text,
    series_text,
)
from sidestep.metrics.engine import Engine, Key, Number
from sidestep.metrics.histogram import State

ENGINES_PER_BLOCK = 32
"""Engines in a block."""
PER_SLICE = 50
"""Series to write before yielding to the event loop: a few microseconds each."""


class _BlockUpdate(NamedTuple):
    """A cached block of engines, their present versions, and the indexes of the changed ones."""

    start: int
    before: Block | None
    versions: Sequence[object]
    places: Sequence[int]


class OpenSection:
    """A family that is not in slots; an engine's text is cached until the engine changes.

    Args:
        dialect: The engines' dialect; empty for a self-described family, which any engine may have.
        placed: The slot assignment; None for a self-described family.
    """

    def __init__(
        self, family: Family, dialect: str, placed: SlotAssignment | None, labels: LabelTexts
    ) -> None:
        self._family = family
        self._dialect = dialect
        self._placed = placed
        self._labels = labels
        self._form = ("",) if placed is None else label_form(placed)
        self._templates = HistogramTemplates(family.name, family.kind)
        self._label_versions: Sequence[int] = ()
        self._blocks: dict[int, Block] = {}
        self._pairs: dict[int, dict[Key, bytes]] = {}
        """Label text by label version of the engine."""

    def begin(self, selections: Selections) -> Iterator[bytes]:
        """See ``Section``."""
        engines = self.engines(selections)
        versions = self.versions(engines)
        jobs: list[_BlockUpdate] = []
        stale: list[Engine] = []
        for start in range(0, len(engines), ENGINES_PER_BLOCK):
            some = versions[start : start + ENGINES_PER_BLOCK]
            before = self._blocks.get(start)
            places = changed_entries(before, some)
            stale += [engines[start + place] for place in places]
            jobs.append(_BlockUpdate(start, before, some, places))
        return self._texts(jobs, self.snapshot(stale), self._blocks)

    def snapshot(self, engines: Sequence[Engine]) -> Iterator[EngineSnapshot[State]]:
        """Copy the values that ``engines`` have of the family."""
        return snapshot_engines(self._family, self._placed, engines, histogram_state)

    def engines(self, selections: Selections) -> Sequence[Engine]:
        """Return the engines that have the family; drop cached text of other label versions."""
        family = self._family
        if self._placed is None:
            found = selections.of_all(live=family.kind == "gauge").engines
            found = [engine for engine in found if family.name in engine.open_families]
        else:
            found = engines_with_samples(
                selections.of_row(self._dialect, self._placed).engines, self._placed
            )
        label_versions = [engine.label_version for engine in found]
        if label_versions != self._label_versions:
            self._label_versions, self._blocks = label_versions, {}
            cached = self._pairs.keys() & set(label_versions)
            self._pairs = {label_version: self._pairs[label_version] for label_version in cached}
        return found

    def versions(self, engines: Sequence[Engine]) -> Sequence[object]:
        """Return values that change whenever an engine's part of the family may have changed."""
        placed = self._placed
        source = None if placed is None else placed.row.source
        if placed is not None and isinstance(source, Computed):
            return row_numbers(placed, engines)
        if isinstance(source, Info | Constant):
            return [engine.label_version for engine in engines]
        return [engine.version for engine in engines]

    def children(self, copy: EngineSnapshot[State]) -> Iterator[tuple[bytes, Number | State]]:
        """Yield the values by their label text, which is cached while the series exists."""
        engine, label_version, names, children = copy
        before, known = self._pairs.get(label_version, {}), {}
        for key, value in children:
            if not key:
                # Other families have the same labels.
                yield self._labels.text(engine, self._family, self._form, names, key), value
                continue
            pairs = before.get(key)
            if pairs is None:
                pairs = label_text(series_labels(engine, self._family, names, key)).encode()
            known[key] = pairs
            yield pairs, value
        if known:
            self._pairs[label_version] = known
        else:
            self._pairs.pop(label_version, None)

    def _line(self, pairs: bytes, value: Number | State) -> bytes:
        if isinstance(value, tuple):
            return self._templates.fill(pairs, value)
        return f"{series_text(self._family.name, pairs.decode())}{value!r}\n".encode()

    def _texts(
        self,
        jobs: Sequence[_BlockUpdate],
        snapshots: Iterator[EngineSnapshot[State]],
        blocks: dict[int, Block],
    ) -> Iterator[bytes]:
        spent = 0
        for start, before, versions, places in jobs:
            block = before
            if places or block is None:
                texts: dict[int, bytes] = {}
                for place, copy in zip(places, snapshots, strict=False):
                    lines: list[bytes] = []
                    for pairs, value in self.children(copy):
                        lines.append(self._line(pairs, value))
                        spent += 1
                        if spent >= PER_SLICE:
                            yield b""
                            spent = 0
                    texts[place] = b"".join(lines)
                block = blocks[start] = updated(before, versions, texts)
            yield block.text


_Children = Sequence[tuple[bytes, Number | State]]
"""One engine's part of a shared family, by label text."""
_ChildrenSteps = Iterator[_Children | None]
"""One engine after the other; None asks to yield to the event loop."""


class _CachedChildren(NamedTuple):
    """One engine's part, and its version."""

    version: object
    children: _Children


class _DialectPart:
    """One dialect's part of a shared family, cached until an engine changes."""

    def __init__(self, section: OpenSection) -> None:
        self.section = section
        self.known: dict[int, _CachedChildren] = {}
        """By label version of the engine."""

    def begin(self, selections: Selections) -> tuple[Sequence[tuple[int, object]], _ChildrenSteps]:
        """Return the present versions, and an iterator of the engines' parts."""
        engines = self.section.engines(selections)
        label_versions = [engine.label_version for engine in engines]
        versions = [*zip(label_versions, self.section.versions(engines), strict=True)]
        before = [self._unchanged(*version) for version in versions]
        stale = [engine for engine, cached in zip(engines, before, strict=True) if cached is None]
        return versions, self._children(versions, before, self.section.snapshot(stale))

    def _unchanged(self, label_version: int, version: object) -> _CachedChildren | None:
        """Return an engine's cached part if it is current."""
        cached = self.known.get(label_version)
        return None if cached is None or cached.version != version else cached

    def _children(
        self,
        versions: Sequence[tuple[int, object]],
        before: Sequence[_CachedChildren | None],
        snapshots: Iterator[EngineSnapshot[State]],
    ) -> _ChildrenSteps:
        """Yield one engine after the other, then cache them all.

        Without an entry in ``before``, the next of ``snapshots`` is the engine's. Its present label
        version could not tell: a Hello may have changed it since the snapshot.
        """
        known: dict[int, _CachedChildren] = {}
        for (label_version, version), last in zip(versions, before, strict=True):
            cached = last
            if cached is None:
                children: list[tuple[bytes, Number | State]] = []
                for number, child in enumerate(self.section.children(next(snapshots)), start=1):
                    children.append(child)
                    if not number % PER_SLICE:
                        yield None
                cached = _CachedChildren(version, children)
            known[label_version] = cached
            yield cached.children
        self.known = known


class SharedSection:
    """A family in which engines can have equal labels: their series are aggregated."""

    def __init__(self, family: Family, labels: LabelTexts) -> None:
        self._family = family
        self._templates = HistogramTemplates(family.name, family.kind)
        self._parts = [
            _DialectPart(OpenSection(family, dialect, placed, labels))
            for dialect, placed in family.assignments.items()
        ]
        self._marks: Sequence[object] | None = None
        self._text = b""

    def begin(self, selections: Selections) -> Iterator[bytes]:
        """See ``Section``."""
        begun = [part.begin(selections) for part in self._parts]
        versions = [version for versions, _ in begun for version in versions]
        if versions == self._marks:
            return iter((self._text,))
        return self._texts(versions, chain.from_iterable(shares for _, shares in begun))

    def _texts(self, versions: Sequence[object], shares: _ChildrenSteps) -> Iterator[bytes]:
        groups: dict[bytes, list[Number | State]] = {}
        spent = 0
        for children in shares:
            for pairs, value in children or ():
                groups.setdefault(pairs, []).append(value)
            spent += 1 + len(children or ())
            if children is None or spent >= PER_SLICE:
                yield b""
                spent = 0
        lines: list[bytes] = []
        for pairs, values in groups.items():
            making = aggregate_values(values, self._family.combine, aggregate_states)
            value = yield from run_yielding(making, b"")
            lines.append(self._line(pairs, value))
            spent += len(values)
            if spent >= PER_SLICE:
                yield b""
                spent = 0
        self._marks, self._text = versions, b"".join(lines)
        yield self._text

    def _line(self, pairs: bytes, value: Number | State) -> bytes:
        if isinstance(value, tuple):
            return self._templates.fill(pairs, value)
        return f"{series_text(self._family.name, pairs.decode())}{format_number(value)}\n".encode()
