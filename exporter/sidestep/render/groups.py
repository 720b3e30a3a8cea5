"""Engines that only dropped labels tell apart, and those gone whose counts are still in sums."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from sidestep.catalogue.model import ENGINE_LABELS
from sidestep.choice import RANKS, Choice
from sidestep.engine import Engine, Key
from sidestep.plan import Layout, Placed
from sidestep.registry import Registry
from sidestep.render.rosters import Rosters
from sidestep.view import having

Labels = tuple[tuple[str, str], ...]
"""Sorted by name."""

MAX_OUTER = 20_000
"""Label sets of engines that are kept."""

Asked = tuple[int, Key, bool]
"""Which list of engines show a family, which of their labels it has not, and whether it counts."""


class Group:
    """Engines whose series are told apart by dropped labels alone.

    Attributes:
        members: Those that are shown, and before them, of a family that counts, those that
            are not any more.
        speakers: Of them, one rank a replica.
    """

    def __init__(self, labels: Labels, members: list[Engine]) -> None:
        self.labels = labels
        self.members = members

    @functools.cached_property
    def speakers(self) -> list[Engine]:
        """See above."""
        return _speakers(self.members) if len(self.members) > 1 else self.members


class Groups:
    """Who is together with whom on one page; an engine that goes or comes meanwhile does so with the next."""

    def __init__(self, registry: Registry, choice: Choice) -> None:
        self._registry = registry
        self._dropped = choice.dropped
        self._rosters = Rosters(registry)
        self._outers: dict[tuple[int, Key], Labels] = {}
        self._groups: dict[Asked, tuple[Sequence[Engine], list[Group]]] = {}
        """With the list, so that no other gets its address."""
        self._gone: dict[tuple[Layout, Key], dict[Labels, list[Engine]]] = {}

    def renew(self) -> None:
        """See the engines that there are now."""
        self._rosters.renew()
        self._groups = {}
        self._gone = {}
        if len(self._outers) > MAX_OUTER:
            self._outers.clear()

    def showing(self, dialect: str, placed: Placed) -> list[Engine]:
        """The engines that have samples of a dialect's row."""
        return having(self._rosters.of(dialect, placed).engines, placed)

    def everyone(self, *, live: bool) -> Sequence[Engine]:
        """The engines of all dialects."""
        return self._rosters.all(live=live).engines

    def of(self, shown: Sequence[Engine], hidden: Key, *, counts: bool) -> list[Group]:
        """``shown`` by what labels they have without ``hidden`` ones."""
        asked = id(shown), hidden, counts
        known = self._groups.get(asked)
        if known is not None:
            return known[1]
        by_labels: dict[Labels, list[Engine]] = {}
        for engine in shown:
            by_labels.setdefault(self._outer(engine, hidden), []).append(engine)
        groups: list[Group] = []
        for labels, members in by_labels.items():
            everyone = members
            if counts and self._dropped:
                gone = self._gone_of(members[0].layout, hidden).get(labels, ())
                everyone = [engine for engine in gone if engine not in members] + members
            groups.append(Group(labels, everyone))
        self._groups[asked] = shown, groups
        return groups

    def _gone_of(self, layout: Layout, hidden: Key) -> dict[Labels, list[Engine]]:
        """Engines that are not shown any more, whose counts are in sums nevertheless."""
        found = self._gone.get((layout, hidden))
        if found is None:
            found = self._gone[layout, hidden] = {}
            absent = [engine for engine in self._registry.engines.values() if engine.absent]
            for engine in (*self._registry.kept.values(), *absent):
                if engine.layout is layout:
                    found.setdefault(self._outer(engine, hidden), []).append(engine)
        return found

    def _outer(self, engine: Engine, hidden: Key) -> Labels:
        """Labels that ``engine`` has in common with others on this page."""
        known = self._outers.get((engine.looks, hidden))
        if known is None:
            pairs = engine.labels.items()
            shown = ((n, v) for n, v in pairs if n not in self._dropped and n not in hidden)
            known = self._outers[engine.looks, hidden] = tuple(sorted(shown))
        return known


@functools.cache
def hidden_from(shown: Key) -> Key:
    """Of the labels that nearly all families have, those that one of ``shown`` labels has not."""
    return tuple(name for name in ENGINE_LABELS if name not in shown)


def _speakers(engines: Iterable[Engine]) -> list[Engine]:
    """One rank of each replica: the others tell the same of the same requests."""
    found: dict[Labels, list[tuple[tuple[int, ...], Engine]]] = {}
    for engine in engines:
        labels = engine.labels.items()
        replica = tuple(sorted((n, v) for n, v in labels if n not in RANKS and n != "origin"))
        rank = tuple(_rank(engine.labels.get(name, "")) for name in RANKS)
        found.setdefault(replica, []).append((rank, engine))
    speakers: list[Engine] = []
    for ranks in found.values():
        first = min(rank for rank, _ in ranks)
        speakers += [engine for rank, engine in ranks if rank == first]
    return speakers


def _rank(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0
