"""Engines that only dropped labels tell apart, and those gone whose counts are still in sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from sidestep.catalog.layout import Layout, SlotAssignment
from sidestep.catalog.model import ENGINE_LABELS, Row
from sidestep.exposition.families import having
from sidestep.exposition.selection import Rosters
from sidestep.exposition.series_filter import RANKS, Choice
from sidestep.metrics.engine import ORIGIN, Engine, Key
from sidestep.metrics.registry import Registry

Labels = tuple[tuple[str, str], ...]
"""Sorted by name."""

MAX_OUTER = 20_000
"""Label sets of engines that are kept."""

AT_ONCE = 100
"""Engines that are looked at for the first time between two turns of the loop: some 5 us each."""
MAX_KNOWN = 16
"""Lists of engines whose groups are kept, of which few differ: all, those alive, those with LoRA."""

Replica = tuple[Labels, tuple[int, ...]]
"""What the ranks of one replica have in common, and which of them it is."""


class Group:
    """Engines whose series are told apart by dropped labels alone.

    Attributes:
        members: Those that are shown, and before them, of a family that counts, those that
            are not any more.
        speakers: Of them, one rank a replica.
    """

    def __init__(
        self, labels: Labels, members: list[Engine], replica: Callable[[Engine], Replica]
    ) -> None:
        self.labels = labels
        self.members = members
        self._replica = replica

    @functools.cached_property
    def speakers(self) -> list[Engine]:
        """See above; the other ranks tell the same of the same requests."""
        if len(self.members) == 1:
            return self.members
        found: dict[Labels, list[tuple[tuple[int, ...], Engine]]] = {}
        for engine in self.members:
            replica, rank = self._replica(engine)
            found.setdefault(replica, []).append((rank, engine))
        speakers: list[Engine] = []
        for ranks in found.values():
            first = min([rank for rank, _ in ranks])
            speakers += [engine for rank, engine in ranks if rank == first]
        return speakers


Tellers = tuple[Labels, Sequence[Engine]]
"""Those of a group who have a say, and what labels they have in common."""


class Grouping:
    """All engines that show a family, by what labels they have.

    Attributes:
        looks: How those look that are shown.
        gone: Likewise, of others that may be together with them.
        groups: Those that only dropped labels tell apart.
    """

    def __init__(self, looks: Sequence[int], gone: Sequence[int], groups: list[Group]) -> None:
        self.looks = looks
        self.gone = gone
        self.groups = groups

    def tellers(self, row: Row) -> list[Tellers]:
        """Those who have a say in ``row``, by group."""
        told = self._speakers if row.mirrored else self._members
        if told and row.name in told[0][1][0].layout.gated:
            return [
                (labels, [e for e in some if row.feature in e.features]) for labels, some in told
            ]
        return told

    @functools.cached_property
    def _members(self) -> list[Tellers]:
        return [(group.labels, group.members) for group in self.groups]

    @functools.cached_property
    def _speakers(self) -> list[Tellers]:
        return [(group.labels, group.speakers) for group in self.groups]


class Question(NamedTuple):
    """Engines that show a family, the labels that it has not, and whether it counts."""

    shown: Sequence[Engine]
    hidden: Key
    counts: bool


class Groups:
    """Who is together with whom, kept from page to page while engines look the same."""

    def __init__(self, registry: Registry, choice: Choice) -> None:
        self._registry = registry
        self._dropped = choice.dropped
        self._rosters = Rosters(registry)
        self._outers: dict[tuple[int, Key], Labels] = {}
        self._replicas: dict[int, Replica] = {}
        self._known: dict[tuple[Key, bool], list[Grouping]] = {}
        """By the labels that a family has not, and whether it counts; the last used one first."""
        self._version = -1
        self._gone: dict[Layout, list[Engine]] = {}
        self._asked: dict[tuple[int, Key, bool], tuple[Question, Grouping]] = {}
        """Of this version of the registry, by the list, which is kept: no other gets its address."""
        self._looks: Sequence[int] = ()

    def renew(self) -> None:
        """A page begins: forget what was of engines that have gone for good."""
        self._rosters.renew()
        self._version = -1
        self._asked = {}
        there = chain(self._registry.engines.values(), self._registry.retired.values())
        looks = [engine.label_version for engine in there]
        if looks != self._looks:
            self._looks = looks
            known = frozenset(looks)
            self._known = {
                asked: [one for one in kept if known.issuperset((*one.looks, *one.gone))]
                for asked, kept in self._known.items()
            }
        for texts in (self._outers, self._replicas):
            if len(texts) > MAX_OUTER:
                texts.clear()

    def showing(self, dialect: str, placed: SlotAssignment) -> list[Engine]:
        """The engines that have samples of a dialect's row."""
        return having(self._rosters.of(dialect, placed).engines, placed)

    def everyone(self, *, live: bool) -> Sequence[Engine]:
        """The engines of all dialects."""
        return self._rosters.all(live=live).engines

    def prepare(self, question: Question, *, mirrored: bool) -> Iterator[None]:
        """Look at engines that ``of`` would see for the first time; a turn is due at each step."""
        spent = 0
        for engine in (*self._gone_beside(question), *question.shown):
            if (engine.label_version, question.hidden) not in self._outers:
                self._outer(engine, question.hidden)
                spent += 1
            if mirrored and engine.label_version not in self._replicas:
                self._replica(engine)
                spent += 1
            if spent >= AT_ONCE:
                yield
                spent = 0

    def known(self, question: Question) -> Grouping | None:
        """Who is together, if that was asked before."""
        shown, hidden, counts = question
        gone = self._gone_beside(question)
        asked = self._asked.get((id(shown), hidden, counts))
        if asked is not None:
            return asked[1]
        looks = [engine.label_version for engine in shown]
        left = [engine.label_version for engine in gone]
        kept = self._known.get((hidden, counts), [])
        for place, known in enumerate(kept):
            # No two engines look the same, and none goes back to what it looked like.
            if known.looks == looks and known.gone == left:
                kept.insert(0, kept.pop(place))
                self._asked[id(shown), hidden, counts] = question, known
                return known
        return None

    def of(self, question: Question) -> Grouping:
        """Who is together of those that are shown."""
        known = self.known(question)
        if known is None:
            shown, hidden, counts = question
            known = self._grouped(shown, self._gone_beside(question), hidden)
            kept = self._known.setdefault((hidden, counts), [])
            kept.insert(0, known)
            del kept[MAX_KNOWN:]
            self._asked[id(shown), hidden, counts] = question, known
        return known

    def _grouped(self, shown: Sequence[Engine], gone: Sequence[Engine], hidden: Key) -> Grouping:
        by_labels: dict[Labels, list[Engine]] = {}
        for engine in shown:
            by_labels.setdefault(self._outer(engine, hidden), []).append(engine)
        before: dict[Labels, list[Engine]] = {}
        there = set(shown)
        for engine in gone:
            labels = self._outer(engine, hidden)
            if labels in by_labels and engine not in there:
                before.setdefault(labels, []).append(engine)
        groups = [
            Group(labels, before.get(labels, []) + members, self._replica)
            for labels, members in by_labels.items()
        ]
        return Grouping([e.label_version for e in shown], [e.label_version for e in gone], groups)

    def _gone_beside(self, question: Question) -> Sequence[Engine]:
        """Engines that are not shown any more, whose counts are in sums nevertheless."""
        registry = self._registry
        if self._version != registry.version:
            self._version = registry.version
            self._asked = {}
            self._gone = {}
            absent = [engine for engine in registry.engines.values() if engine.absent]
            for engine in (*registry.retired.values(), *absent):
                self._gone.setdefault(engine.layout, []).append(engine)
        if not question.counts or not self._dropped or not self._gone:
            return ()
        layouts = dict.fromkeys([engine.layout for engine in question.shown])
        return [engine for layout in layouts for engine in self._gone.get(layout, ())]

    def _outer(self, engine: Engine, hidden: Key) -> Labels:
        """Labels that ``engine`` has in common with others on this page."""
        known = self._outers.get((engine.label_version, hidden))
        if known is None:
            pairs = engine.labels.items()
            shown = ((n, v) for n, v in pairs if n not in self._dropped and n not in hidden)
            known = self._outers[engine.label_version, hidden] = tuple(sorted(shown))
        return known

    def _replica(self, engine: Engine) -> Replica:
        """Which replica ``engine`` belongs to."""
        known = self._replicas.get(engine.label_version)
        if known is None:
            pairs = engine.labels.items()
            replica = tuple(sorted((n, v) for n, v in pairs if n not in RANKS and n != ORIGIN))
            rank = tuple(_rank(engine.labels.get(name, "")) for name in RANKS)
            known = self._replicas[engine.label_version] = replica, rank
        return known


@functools.cache
def hidden_from(shown: Key) -> Key:
    """Of the labels that nearly all families have, those that one of ``shown`` labels has not."""
    return tuple(name for name in ENGINE_LABELS if name not in shown)


def _rank(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
