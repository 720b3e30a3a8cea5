"""Series that only labels told apart which are gone: as one, by the catalogue's rules.

What several engines counted goes on when one of them has gone, as long as its
totals are kept and another has the same labels: Prometheus would take less for a reset.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from sidestep.catalogue.model import Combine, Hook, Info, Row
from sidestep.choice import Choice
from sidestep.combining import (
    combined_adapters,
    combined_info,
    combined_numbers,
    combined_states,
)
from sidestep.engine import Engine, Key, Number
from sidestep.histogram import Histogram, State
from sidestep.plan import Placed
from sidestep.registry import Registry
from sidestep.render.groups import Group, Groups, Labels, hidden_from
from sidestep.view import (
    Family,
    catalogued,
    described,
    own_names,
    owns,
    read_values,
    spoken,
    stored_children,
)

Value = Number | State
Series = tuple[Labels, Value]

AT_ONCE = 50
"""Series between two turns of the loop: some 10 us each, at first."""
LORA = Hook("lora")
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
        """The series of ``family`` as of the call, by their labels; None where a turn is due."""
        found: list[Iterable[_Found]] = []
        by_length = False
        if not family.places and (some := self._open(family)):
            found.append(some)
        for dialect, placed in family.places.items():
            shown = self._groups.showing(dialect, placed)
            row = placed.row
            by_length = by_length or row.unless_empty
            if shown:
                hidden = hidden_from(row.labels)
                groups = self._groups.of(shown, hidden, counts=row.kind != "gauge")
                told = [(group, _tellers(row, group)) for group in groups]
                if placed.where in ("histogram", "scalars", "reading", "constant"):
                    copied = [(group.labels, _values(placed, engines)) for group, engines in told]
                    found.append(self._in_slots(placed, copied))
                else:
                    others: list[_Found] = []
                    for group, engines in told:
                        self._add(family, placed, group, engines, others)
                    found.append(others)
        if not found:
            return iter(())
        return _series(chain.from_iterable(found), family.combine, by_length=by_length)

    def _add(
        self,
        family: Family,
        placed: Placed,
        group: Group,
        engines: list[Engine],
        found: list[_Found],
    ) -> None:
        row = placed.row
        if row.source == LORA and "engine" in self.choice.dropped:
            self._add_adapters(placed, group, found)
        elif isinstance(row.source, Info):
            name = row.source.name
            self._add_info(group.labels, [e.info[name] for e in engines if name in e.info], found)
        else:
            self._add_children(family, engines, group.labels, row, found)

    def _in_slots(
        self, placed: Placed, copied: Iterable[tuple[Labels, Sequence[Sequence[Value | None]]]]
    ) -> Iterator[_Found]:
        """What engines have by slot, one series after the other."""
        row = placed.row
        owns = [self._own(row.own_labels, key) for key in placed.values_of_label]
        for outer, engines in copied:
            for own, some in zip(owns, zip(*engines, strict=True), strict=False):
                values = [value for value in some if value is not None]
                if row.per != 1:
                    values = [value / row.per for value in values if not isinstance(value, tuple)]
                if values:
                    yield _Found(outer, own, values)

    def _add_children(
        self,
        family: Family,
        engines: Iterable[Engine],
        outer: Labels,
        row: Row | None,
        found: list[_Found],
    ) -> None:
        """Whatever else has children: those with open labels, self-described, computed."""
        total = row is not None and row.unless_empty
        for engine in engines:
            names = own_names(engine, family)
            gone = [at for at, name in enumerate(names) if name in self.choice.dropped]
            some = list(stored_children(engine, family))
            if total and gone:
                # What has none of these labels is the sum of what has.
                whole = [c for c in some if not any(c[0][at] for at in gone)]
                some = whole or some
            for key, value in some:
                own = self._own(names, key, unless_empty=total)
                copied = value.state if isinstance(value, Histogram) else value
                found.append(_Found(outer, own, (copied,)))

    def _add_info(
        self, outer: Labels, said: Sequence[Mapping[str, str]], found: list[_Found]
    ) -> None:
        if not said:
            return
        labels = combined_info(said)
        own = tuple((n, v) for n, v in sorted(labels.items()) if n not in self.choice.dropped)
        found.append(_Found(outer, own, (1,), whole=True))

    def _add_adapters(self, placed: Placed, group: Group, found: list[_Found]) -> None:
        """What any engine has of LoRA adapters, and the room that all have, as one series."""
        slot = placed.slots[0]
        combinations = [item for e in group.members for item in e.keyed[slot].items()]
        if not combinations:
            return
        layout = group.members[0].layout
        live = [engine for engine in self._groups.everyone(live=True) if engine.layout is layout]
        groups = self._groups.of(live, hidden_from(placed.row.labels), counts=False)
        room = [
            engine.info.get("lora", {}).get("max_lora", "")
            for other in groups
            if other.labels == group.labels
            for engine in other.members
        ]
        key = (
            str(sum(int(one) for one in room if one.isascii() and one.isdigit())),
            combined_adapters(running for (_, running, _), _ in combinations),
            combined_adapters(waiting for (_, _, waiting), _ in combinations),
        )
        own = self._own(placed.row.own_labels, key)
        newest = max(stamp for _, stamp in combinations)
        found.append(_Found(group.labels, own, (newest,), whole=True))

    def _open(self, family: Family) -> list[_Found]:
        """A family that described itself: its engines bring all their labels."""
        found: list[_Found] = []
        is_gauge = family.kind == "gauge"
        everyone = self._groups.everyone(live=is_gauge)
        engines = [engine for engine in everyone if family.name in engine.open]
        for group in self._groups.of(engines, (), counts=not is_gauge):
            if is_gauge and family.name.endswith(INFO):
                some = [list(stored_children(engine, family)) for engine in group.members]
                if max(map(len, some)) == 1:
                    keys = [key for one in some for key, _ in one]
                    said = [dict(zip(family.labels, key, strict=True)) for key in keys]
                    self._add_info(group.labels, said, found)
                    continue
            self._add_children(family, group.members, group.labels, None, found)
        return found

    def _own(self, names: Key, key: Key, *, unless_empty: bool = False) -> Labels:
        dropped = self.choice.dropped
        pairs = zip(names, key, strict=True)
        return tuple((n, v) for n, v in pairs if n not in dropped and (v or not unless_empty))


def _tellers(row: Row, group: Group) -> list[Engine]:
    """Those of ``group`` that have a say in ``row``."""
    engines = group.speakers if row.mirrored else group.members
    if row.name in engines[0].layout.gated:
        return [engine for engine in engines if row.feature in engine.features]
    return engines


def _values(placed: Placed, engines: Sequence[Engine]) -> Sequence[Sequence[Value | None]]:
    """What each of ``engines`` has now, in the order of the slots."""
    slots = placed.slots
    if placed.where == "scalars":
        if len(slots) == 1:
            slot = slots[0]
            return [(engine.values[slot],) for engine in engines]
        chosen = itemgetter(*slots)
        return [chosen(engine.values) for engine in engines]
    if placed.where == "histogram":
        return [
            [None if (one := engine.histograms[slot]) is None else one.state for slot in slots]
            for engine in engines
        ]
    return [(value,) for value in read_values(placed, engines)]


def _series(found: Iterable[_Found], rule: Combine, *, by_length: bool) -> Iterator[Series | None]:
    """``found`` by labels, what has the same ones as one."""
    by_labels: dict[Labels, list[Value]] = {}
    spent = 0
    for outer, own, values, whole in found:
        labels = _joined(outer, own)
        if whole or labels not in by_labels:
            by_labels[labels] = list(values)
        else:
            by_labels[labels] += values
        spent += 1
        if spent >= AT_ONCE:
            yield None
            spent = 0
    # Who reads the first sample alone is to read the sum of the others.
    told = sorted(by_labels.items(), key=lambda one: len(one[0]) if by_length else 0)
    for labels, values in told:
        yield labels, _one(values, rule)
        spent += 1 + len(values)
        if spent >= AT_ONCE:
            yield None
            spent = 0


def _one(values: Sequence[Value], rule: Combine) -> Value:
    states = [value for value in values if isinstance(value, tuple)]
    if states:
        return combined_states(states)
    return combined_numbers([v for v in values if not isinstance(v, tuple)], rule)


def _joined(outer: Labels, own: Labels) -> Labels:
    return tuple(sorted((*outer, *own))) if own else outer
