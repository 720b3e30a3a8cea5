"""Series that only labels told apart which are gone: as one, by the catalogue's rules.

What several engines counted goes on when one of them has gone, as long as its
totals are kept and another has the same labels: Prometheus would take less for a reset.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from sidestep.catalog.layout import SlotAssignment
from sidestep.catalog.model import Combine, Handler, Info, Row
from sidestep.exposition.aggregate import combined_adapters, combined_info, merged, merged_states
from sidestep.exposition.families import Family, catalogued, described, owns, spoken
from sidestep.exposition.family_snapshot import (
    IN_NUMBERS,
    Copy,
    copied,
    histograms_of,
    numbers_of,
    state_of,
)
from sidestep.exposition.grouping import (
    Group,
    Grouping,
    Groups,
    Labels,
    Question,
    Tellers,
    hidden_from,
)
from sidestep.exposition.series_filter import Choice
from sidestep.metrics.engine import Engine, Key, Number
from sidestep.metrics.histogram import State
from sidestep.metrics.registry import Registry

Value = Number | State
Series = tuple[Labels, Value]

AT_ONCE = 50
"""Series between two turns of the loop: some 10 us each, at first."""
LORA = Handler("lora")
INFO = "_info"


class _Found(NamedTuple):
    """What some engines have of one series, and maybe others besides: its labels, and copies.

    Attributes:
        whole: Whether it is all there is of the series, whatever was found before.
    """

    outer: Labels
    own: Labels
    values: Sequence[Value]
    whole: bool = False


class _Asked(NamedTuple):
    """Engines of one dialect, or of none, that show a family, and what ``Groups`` is to tell of them."""

    placed: SlotAssignment | None
    question: Question

    @property
    def is_mirrored(self) -> bool:
        """Whether ranks tell the same."""
        return self.placed is not None and self.placed.row.mirrored


class Merging:
    """The series of a registry without the labels that ``choice`` drops."""

    def __init__(self, registry: Registry, choice: Choice) -> None:
        self.registry = registry
        self.choice = choice
        self._groups = Groups(registry, choice)
        self._families: dict[frozenset[str], list[Family]] = {}
        """Of the catalogue, by the dialects that were spoken last."""

    def families(self, names: Collection[str] = ()) -> list[Family]:
        """Those that engines can have now, all or those that own one of the sample ``names``."""
        dialects = spoken(self.registry)
        if dialects not in self._families:
            self._families = {dialects: list(catalogued(self.registry, dialects))}
        found = [*self._families[dialects], *described(self.registry)]
        if not names:
            return found
        return [family for family in found if owns(family.name, family.kind, names)]

    def refresh(self) -> None:
        """See the engines that there are now."""
        self._groups.renew()

    def series(self, family: Family) -> Iterator[Series | None]:
        """The series of ``family`` as of one moment, by their labels; None where a turn is due."""
        asked = self._asked(family)
        if any(self._groups.known(one.question) is None for one in asked):
            for one in asked:
                yield from self._groups.prepare(one.question, mirrored=one.is_mirrored)
            # Meanwhile others may have come.
            asked = self._asked(family)
        found = [*self._copied(family, asked)]
        # To copy the state of a thousand engines takes most of a slice.
        yield None
        if found:
            by_length = any(placed.row.omits_empty_labels for placed in family.places.values())
            yield from _series(chain.from_iterable(found), family.combine, by_length=by_length)

    def _asked(self, family: Family) -> list[_Asked]:
        """Who shows ``family`` now, by dialect; nobody is left out."""
        if not family.places:
            everyone = self._everyone(family)
            question = Question(everyone, (), family.kind != "gauge")
            return [_Asked(None, question)] if everyone else []
        found = []
        for dialect, placed in family.places.items():
            shown = self._groups.showing(dialect, placed)
            if shown:
                hidden = hidden_from(placed.row.labels)
                question = Question(shown, hidden, placed.row.kind != "gauge")
                found.append(_Asked(placed, question))
        return found

    def _copied(self, family: Family, asked: Iterable[_Asked]) -> Iterator[Iterable[_Found | None]]:
        """What all engines have of ``family`` now, to be read afterwards."""
        for placed, question in asked:
            found = self._groups.of(question)
            if placed is None:
                yield self._open(family, found)
                continue
            row = placed.row
            if row.source == LORA and "engine" in self.choice.dropped:
                yield self._adapters(placed, found.groups)
                continue
            told = found.tellers(row)
            engines = [engine for _, some in told for engine in some]
            if isinstance(row.source, Info):
                name = row.source.name
                said = [(own, [e.info[name] for e in some if name in e.info]) for own, some in told]
                yield self._info(said)
            elif placed.storage == "histogram":
                yield self._in_slots(placed, told, histograms_of(placed, engines, state_of))
            elif placed.storage in IN_NUMBERS:
                yield self._in_slots(placed, told, numbers_of(placed, engines))
            else:
                yield self._children(told, copied(family, placed, engines, state_of), row)

    def _in_slots(
        self, placed: SlotAssignment, told: Iterable[Tellers], values: Sequence[Value | None]
    ) -> Iterator[_Found]:
        """What engines have by slot, one series after the other."""
        row, width = placed.row, len(placed.label_values)
        owns = [self._own(row.own_labels, key) for key in placed.label_values]
        start = 0
        for outer, engines in told:
            end = start + width * len(engines)
            for place, own in enumerate(owns, start):
                some = [value for value in values[place:end:width] if value is not None]
                if row.unit_divisor != 1:
                    some = [
                        value / row.unit_divisor for value in some if not isinstance(value, tuple)
                    ]
                if some:
                    yield _Found(outer, own, some)
            start = end

    def _children(
        self, told: Iterable[Tellers], copies: Iterator[Copy[State]], row: Row | None
    ) -> Iterator[_Found]:
        """Whatever else has children: those with open labels, self-described."""
        total = row is not None and row.omits_empty_labels
        for outer, engines in told:
            for _, _, names, children in islice(copies, len(engines)):
                some = children
                gone = [at for at, name in enumerate(names) if name in self.choice.dropped]
                if total and gone:
                    # What has none of these labels is the sum of what has.
                    whole = [c for c in children if not any(c[0][at] for at in gone)]
                    some = whole or children
                for key, value in some:
                    yield _Found(outer, self._own(names, key, unless_empty=total), (value,))

    def _info(
        self, said: Iterable[tuple[Labels, Sequence[Mapping[str, str]]]]
    ) -> Iterator[_Found | None]:
        for outer, infos in said:
            if infos:
                labels = yield from combined_info(infos)
                own = ((n, v) for n, v in sorted(labels.items()) if n not in self.choice.dropped)
                yield _Found(outer, tuple(own), (1,), whole=True)

    def _adapters(self, placed: SlotAssignment, groups: Sequence[Group]) -> Iterator[_Found]:
        """What any engine has of LoRA adapters, and the room that all have, as one series."""
        slot = placed.slots[0]
        layout = groups[0].members[0].layout
        live = [engine for engine in self._groups.everyone(live=True) if engine.layout is layout]
        hidden = hidden_from(placed.row.labels)
        room: dict[Labels, int] = {}
        for group in self._groups.of(Question(live, hidden, counts=False)).groups:
            told = [engine.info.get("lora", {}).get("max_lora", "") for engine in group.members]
            room[group.labels] = sum(int(one) for one in told if one.isascii() and one.isdigit())
        kept = [
            (group.labels, [item for e in group.members for item in e.keyed[slot].items()])
            for group in groups
        ]
        return self._combined_adapters(placed, kept, room)

    def _combined_adapters(
        self,
        placed: SlotAssignment,
        kept: Iterable[tuple[Labels, Sequence[tuple[Key, Number]]]],
        room: Mapping[Labels, int],
    ) -> Iterator[_Found]:
        for outer, combinations in kept:
            if combinations:
                key = (
                    str(room.get(outer, 0)),
                    combined_adapters(running for (_, running, _), _ in combinations),
                    combined_adapters(waiting for (_, _, waiting), _ in combinations),
                )
                own = self._own(placed.row.own_labels, key)
                newest = max(stamp for _, stamp in combinations)
                yield _Found(outer, own, (newest,), whole=True)

    def _everyone(self, family: Family) -> Sequence[Engine]:
        """The engines that have a family that described itself."""
        everyone = self._groups.everyone(live=family.kind == "gauge")
        return [engine for engine in everyone if family.name in engine.open_families]

    def _open(self, family: Family, found: Grouping) -> Iterable[_Found | None]:
        """A family that described itself: its engines bring all their labels."""
        is_gauge = family.kind == "gauge"
        told = [(group.labels, group.members) for group in found.groups]
        engines = [engine for _, some in told for engine in some]
        copies = copied(family, None, engines, state_of)
        if is_gauge and family.name.endswith(INFO):
            return self._open_info(family, told, copies)
        return self._children(told, copies, None)

    def _open_info(
        self, family: Family, told: Iterable[Tellers], copies: Iterator[Copy[State]]
    ) -> Iterator[_Found | None]:
        """An info metric: where each engine has one, they are combined as such."""
        for one in told:
            outer, engines = one
            some = [*islice(copies, len(engines))]
            children = [copy[3] for copy in some]
            if max(map(len, children)) == 1:
                keys = [key for each in children for key, _ in each]
                said = [dict(zip(family.labels, key, strict=True)) for key in keys]
                yield from self._info([(outer, said)])
            else:
                yield from self._children([one], iter(some), None)

    def _own(self, names: Key, key: Key, *, unless_empty: bool = False) -> Labels:
        dropped = self.choice.dropped
        pairs = zip(names, key, strict=True)
        return tuple((n, v) for n, v in pairs if n not in dropped and (v or not unless_empty))


def _series(
    found: Iterable[_Found | None], rule: Combine, *, by_length: bool
) -> Iterator[Series | None]:
    """``found`` by labels, what has the same ones as one."""
    # Who reads the first sample alone is to read the sum of the others.
    by_size: dict[int, dict[Labels, list[Value]]] = {}
    spent = 0
    for one in found:
        if one is None or spent >= AT_ONCE:
            yield None
            spent = 0
        if one is not None:
            labels = _joined(one.outer, one.own)
            by_labels = by_size.setdefault(len(labels) if by_length else 0, {})
            if one.whole or labels not in by_labels:
                by_labels[labels] = list(one.values)
            else:
                by_labels[labels] += one.values
            spent += 1
    for size in sorted(by_size):
        for labels, values in by_size[size].items():
            value = yield from merged(values, rule, merged_states)
            yield labels, value
            spent += 1 + len(values)
            if spent >= AT_ONCE:
                yield None
                spent = 0


def _joined(outer: Labels, own: Labels) -> Labels:
    return tuple(sorted((*outer, *own))) if own else outer
