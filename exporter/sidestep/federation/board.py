"""Which engine here each word of other exporters counts for, and which have to be added up again."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any

from sidestep.errors import WireError
from sidestep.federation.federated_engine import Group, Said, Shown, split
from sidestep.federation.identity import settle
from sidestep.federation.lives import Key, Lives, Word
from sidestep.federation.sums import Made, make
from sidestep.federation.sums import put as show
from sidestep.metrics.registry import Registry
from sidestep.protocol.records import Record

FEW = 4
"""Words that are added up for each that is new; a sum of more waits for others that are."""

Changes = list[tuple[Shown, Made | None]]
"""Engines that are to show something else; None: nothing any more."""
NOTHING: Mapping[Any, Any] = MappingProxyType({})


class Board:
    """Engines that other exporters count.

    Args:
        registry: That has the engines.
        lives: That has the words.

    Attributes:
        shown: The engines.
        groups: Whose each word is.
        stale: Engines that do not show what their words say, the longest waiting first.
    """

    def __init__(self, registry: Registry, lives: Lives) -> None:
        self._registry = registry
        self._lives = lives
        self.shown: dict[Group, Shown] = {}
        self.groups: dict[Key, Group] = {}
        self.stale: dict[Group, None] = {}

    def of(self, key: Key) -> Shown:
        """The engine that the word of that key counts for."""
        return self.shown[self.groups[key]]

    def is_due(self, shown: Shown) -> bool:
        """Whether ``shown`` is to be added up now that a word counts otherwise; if not, some time."""
        how = split(shown.words, is_told_whole=shown.is_told_whole)
        is_other = how.form != shown.form and not all(word.silent for word in how.present)
        if not (shown.changed or is_other):
            return False
        self.stale[shown.group] = None
        return max(shown.changed, 1) * FEW >= len(how.present)

    def may_wait(self, shown: Shown) -> bool:
        """Whether others will come before it is worth while to add up ``shown`` for one that is new."""
        return (shown.changed + 1) * FEW < shown.present

    def changed(
        self,
        shown: Shown,
        without: AbstractSet[Key],
        words: Mapping[Key, Word] = NOTHING,
        said: Mapping[Key, Said] = NOTHING,
        decoded: Mapping[Key, Record] = NOTHING,
    ) -> Generator[None, None, Made | None]:
        """What ``shown`` comes to without some of its words and with others; None without any."""
        kept = shown.words.keys() - without
        words = {**{key: shown.words[key] for key in shown.words if key in kept}, **words}
        said = {**{key: shown.said[key] for key in kept}, **said}
        return (yield from make(self._registry, shown, words, said, decoded)) if words else None

    def put(self, changes: Changes, now: float) -> WireError | None:
        """Let engines show what was made, all of them in one step."""
        refused: WireError | None = None
        for shown, made in changes:
            if made is None:
                shown.words.clear()
                self.drop(shown.group)
                continue
            refused = show(self._registry, made) or refused
            self.stale.pop(shown.group, None)
            self.groups.update(dict.fromkeys(shown.words, shown.group))
        for shown, _ in changes:
            try:
                if shown.words:
                    settle(self._registry, shown, now)
            except WireError as error:
                refused = error
        return refused

    def add_up(self, shown: Shown) -> Iterator[None]:
        """Let ``shown`` show what its words say.

        Raises:
            WireError: Some of the families that describe themselves are left out.
        """
        self.stale.pop(shown.group, None)
        made = yield from make(self._registry, shown, shown.words, shown.said, {})
        if self.is_gone(shown):
            return
        refused = show(self._registry, made)
        if refused is not None:
            raise refused

    def bind(self, shown: Shown, word: Word, said: Said) -> None:
        """Let ``word`` be one of those that ``shown`` is the sum of, once it is added up again."""
        self.groups[word.key] = shown.group
        shown.words[word.key] = word
        shown.said[word.key] = shown.intern(word.key, said)
        self.stale[shown.group] = None

    def enter(self, shown: Shown) -> None:
        """Remember ``shown``, which is not shown yet, unless it is there."""
        if shown.group not in self.shown:
            self.shown[shown.group] = shown
            self._registry.retired[shown.engine.id] = shown.engine

    def is_gone(self, shown: Shown) -> bool:
        """Whether it was forgotten meanwhile."""
        return self.shown.get(shown.group) is not shown

    def drop(self, group: Group) -> None:
        """Forget an engine, and all that was said of it."""
        shown = self.shown.pop(group)
        self.stale.pop(group, None)
        self._lives.drop(shown.words.values())
        for key in shown.words:
            del self.groups[key]
        self._registry.discard(shown.engine)
