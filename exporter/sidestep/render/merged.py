"""Pages on which labels are gone, and the series that only they told apart are one.

The pod's page is one; so is every page where an administrator drops a label or thins
buckets. What several engines counted goes on when one of them has gone, as long as its
totals are kept and another has the same labels: Prometheus would take less for a reset.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from sidestep.buckets import Bounds
from sidestep.catalogue.model import ENGINE_LABELS, Combine, Hook, Info, Row
from sidestep.choice import RANKS, Choice
from sidestep.combining import (
    combined_adapters,
    combined_histograms,
    combined_info,
    combined_numbers,
)
from sidestep.engine import Engine, Key, Number
from sidestep.histogram import Histogram
from sidestep.plan import Layout, Placed
from sidestep.registry import Registry
from sidestep.render.text import header, histogram_frame, label_text, number
from sidestep.view import (
    Family,
    asked,
    catalogued,
    described,
    having,
    own_names,
    owns,
    present,
    spoken,
    stored_children,
)

Labels = tuple[tuple[str, str], ...]
"""Sorted by name."""
Values = list[Number | Histogram]

MAX_TEXTS = 100_000
LORA = Hook("lora")
INFO = "_info"


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Engines whose series are told apart by dropped labels alone.

    Attributes:
        members: Those that are shown, and before them, of a family that counts, those that
            are not any more.
        speakers: Of them, one rank a replica.
    """

    labels: Labels
    members: list[Engine]

    @functools.cached_property
    def speakers(self) -> list[Engine]:
        """See above."""
        return _speakers(self.members)


Asked = tuple[tuple[int, ...], Key, bool]
"""Which engines show a family, which of their labels it has not, and whether it counts."""


class Merged:
    """Renders the registry without the labels that ``choice`` drops."""

    def __init__(self, registry: Registry, choice: Choice) -> None:
        self.registry = registry
        self.choice = choice
        self._prefixes: dict[tuple[str, Labels], str] = {}
        self._frames: dict[tuple[str, Labels, Bounds], bytes] = {}
        self._places: dict[tuple[str, Bounds], tuple[int, ...] | None] = {}
        self._families: dict[frozenset[str], list[Family]] = {}
        """Of the catalogue, by the dialects that were spoken last."""
        self._grouped: dict[Asked, list[Group]] = {}
        self._present: dict[tuple[str, bool, str], list[Engine]] = {}
        """Both of one page; an engine that goes or comes meanwhile does so with the next."""

    def pieces(
        self, *, openmetrics: bool = False, names: Collection[str] = ()
    ) -> Iterator[list[bytes]]:
        """The page, a family at a time; the registry may change between two of them."""
        if len(self._prefixes) + len(self._frames) + len(self._places) > MAX_TEXTS:
            self._prefixes.clear()
            self._frames.clear()
            self._places.clear()
        self.refresh()
        for family in self.families(names):
            samples = self._samples(family)
            if samples:
                head = header(family.name, family.kind, family.help, openmetrics=openmetrics)
                yield [head.encode(), *samples]

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
        self._grouped = {}
        self._present = {}

    def series(self, family: Family) -> dict[Labels, Number | Histogram]:
        """The series of ``family``, by their labels."""
        found: dict[Labels, Values] = {}
        if not family.places:
            self._open(family, found)
        for dialect, placed in family.places.items():
            shown = self._showing(dialect, placed)
            if shown:
                row = placed.row
                hidden = _hidden(row.labels)
                for group in self._groups(shown, hidden, counts=row.kind != "gauge"):
                    self._add(family, placed, group, found)
                if row.unless_empty:
                    # Who reads the first sample alone is to read the sum of the others.
                    found = dict(sorted(found.items(), key=lambda item: len(item[0])))
        return {labels: _one(values, family.combine) for labels, values in found.items()}

    def _showing(self, dialect: str, placed: Placed) -> list[Engine]:
        wanted = dialect, *asked(self.registry, dialect, placed)
        engines = self._present.get(wanted)
        if engines is None:
            engines = self._present[wanted] = present(self.registry, *wanted)
        return having(engines, placed)

    def _add(
        self, family: Family, placed: Placed, group: Group, found: dict[Labels, Values]
    ) -> None:
        row = placed.row
        engines = group.speakers if row.mirrored else group.members
        if row.name in engines[0].layout.gated:
            engines = [engine for engine in engines if row.feature in engine.features]
        if placed.where in ("histogram", "scalars"):
            self._add_slots(placed, engines, group.labels, found)
        elif row.source == LORA and "engine" in self.choice.dropped:
            self._add_adapters(placed, group, found)
        elif isinstance(row.source, Info):
            name = row.source.name
            self._add_info(group.labels, [e.info[name] for e in engines if name in e.info], found)
        else:
            self._add_children(family, engines, group.labels, row, found)

    def _add_slots(
        self, placed: Placed, engines: list[Engine], outer: Labels, found: dict[Labels, Values]
    ) -> None:
        row = placed.row
        for key, slot in zip(placed.values_of_label, placed.slots, strict=True):
            values: Values
            if placed.where == "histogram":
                values = [h for e in engines if (h := e.histograms[slot]) is not None]
            else:
                values = [
                    v if row.per == 1 else v / row.per
                    for e in engines
                    if (v := e.values[slot]) is not None
                ]
            if values:
                labels = _joined(outer, self._own(row.own_labels, key))
                found.setdefault(labels, []).extend(values)

    def _add_children(
        self,
        family: Family,
        engines: Iterable[Engine],
        outer: Labels,
        row: Row | None,
        found: dict[Labels, Values],
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
                labels = self._own(names, key, unless_empty=total)
                found.setdefault(_joined(outer, labels), []).append(value)

    def _add_info(
        self, outer: Labels, said: Sequence[Mapping[str, str]], found: dict[Labels, Values]
    ) -> None:
        if not said:
            return
        labels = combined_info(said)
        own = tuple((n, v) for n, v in sorted(labels.items()) if n not in self.choice.dropped)
        found[_joined(outer, own)] = [1]

    def _add_adapters(self, placed: Placed, group: Group, found: dict[Labels, Values]) -> None:
        """What any engine has of LoRA adapters, and the room that all have, as one series."""
        slot = placed.slots[0]
        combinations = [item for e in group.members for item in e.keyed[slot].items()]
        if not combinations:
            return
        hidden = _hidden(placed.row.labels)
        room = [
            engine.info.get("lora", {}).get("max_lora", "")
            for engine in present(self.registry, group.members[0].layout.dialect, live=True)
            if self._outer(engine, hidden) == group.labels
        ]
        key = (
            str(sum(int(one) for one in room if one.isascii() and one.isdigit())),
            combined_adapters(running for (_, running, _), _ in combinations),
            combined_adapters(waiting for (_, _, waiting), _ in combinations),
        )
        labels = self._own(placed.row.own_labels, key)
        found[_joined(group.labels, labels)] = [max(stamp for _, stamp in combinations)]

    def _open(self, family: Family, found: dict[Labels, Values]) -> None:
        """A family that described itself: its engines bring all their labels."""
        is_gauge = family.kind == "gauge"
        engines = [
            engine
            for engine in self.registry.engines.values()
            if family.name in engine.open and not engine.absent and (engine.live or not is_gauge)
        ]
        for group in self._groups(engines, (), counts=not is_gauge):
            if is_gauge and family.name.endswith(INFO):
                some = [list(stored_children(engine, family)) for engine in group.members]
                if max(map(len, some)) == 1:
                    keys = [key for one in some for key, _ in one]
                    said = [dict(zip(family.labels, key, strict=True)) for key in keys]
                    self._add_info(group.labels, said, found)
                    continue
            self._add_children(family, group.members, group.labels, None, found)

    def _groups(self, shown: list[Engine], hidden: Key, *, counts: bool) -> list[Group]:
        """``shown`` by what labels they have without ``hidden`` ones."""
        asked = tuple(map(id, shown)), hidden, counts
        groups = self._grouped.get(asked)
        if groups is None:
            by_labels: dict[Labels, list[Engine]] = {}
            for engine in shown:
                by_labels.setdefault(self._outer(engine, hidden), []).append(engine)
            groups = self._grouped[asked] = []
            for labels, members in by_labels.items():
                everyone = members
                if counts and self.choice.dropped:
                    gone = self._gone(labels, members[0].layout, hidden)
                    everyone = [engine for engine in gone if engine not in members] + members
                groups.append(Group(labels, everyone))
        return groups

    def _gone(self, labels: Labels, layout: Layout, hidden: Key) -> list[Engine]:
        """Engines that are not shown any more, whose counts are in sums nevertheless."""
        absent = [engine for engine in self.registry.engines.values() if engine.absent]
        return [
            engine
            for engine in (*self.registry.kept.values(), *absent)
            if engine.layout is layout and self._outer(engine, hidden) == labels
        ]

    def _outer(self, engine: Engine, hidden: Key) -> Labels:
        """Labels that ``engine`` has in common with others on this page."""
        left_out = self.choice.dropped
        pairs = engine.labels.items()
        return tuple(sorted((n, v) for n, v in pairs if n not in left_out and n not in hidden))

    def _own(self, names: Key, key: Key, *, unless_empty: bool = False) -> Labels:
        dropped = self.choice.dropped
        pairs = zip(names, key, strict=True)
        return tuple((n, v) for n, v in pairs if n not in dropped and (v or not unless_empty))

    def _samples(self, family: Family) -> list[bytes]:
        found = self.series(family)
        lines: list[str] = []
        texts: list[bytes] = []
        for labels, value in found.items():
            if isinstance(value, Histogram):
                texts.append(self._histogram(family, labels, value))
            else:
                place = (family.name, labels)
                prefix = self._prefixes.get(place)
                if prefix is None:
                    prefix = f"{family.name}{label_text(dict(labels))} "
                    self._prefixes[place] = prefix
                lines.append(f"{prefix}{number(value)}\n")
        return ["".join(lines).encode(), *texts] if lines else texts

    def samples_of(self, family: Family, value: Number | Histogram) -> int:
        """Lines of a series."""
        if not isinstance(value, Histogram):
            return 1
        if not value.bounds:
            return 3 if family.kind == "histogram" else 2
        places = self._shown(family, value.bounds)
        return 3 + len(value.bounds if places is None else places)

    def _shown(self, family: Family, bounds: Bounds) -> tuple[int, ...] | None:
        try:
            return self._places[family.name, bounds]
        except KeyError:
            places = self.choice.places(family.name, bounds) if bounds else None
            self._places[family.name, bounds] = places
            return places

    def _histogram(self, family: Family, labels: Labels, histogram: Histogram) -> bytes:
        bounds = histogram.bounds
        places = self._shown(family, bounds)
        frame = self._frames.get((family.name, labels, bounds))
        if frame is None:
            shown = bounds if places is None else tuple(bounds[place] for place in places)
            frame = histogram_frame(family.name, dict(labels), shown, family.kind)
            self._frames[family.name, labels, bounds] = frame
        counts = list(accumulate(histogram.counts))
        buckets = counts
        if family.kind == "summary":
            buckets = []
        elif places is not None:
            buckets = [*(counts[place] for place in places), counts[-1]]
        return frame % (*buckets, counts[-1], repr(histogram.sum).encode())


@functools.cache
def _hidden(shown: Key) -> Key:
    """Of the labels that nearly all families have, those that one of ``shown`` labels has not."""
    return tuple(name for name in ENGINE_LABELS if name not in shown)


def _one(values: Values, rule: Combine) -> Number | Histogram:
    if isinstance(values[0], Histogram):
        return combined_histograms([value for value in values if isinstance(value, Histogram)])
    return combined_numbers([v for v in values if not isinstance(v, Histogram)], rule)


def _joined(outer: Labels, own: Labels) -> Labels:
    return tuple(sorted((*outer, *own))) if own else outer


def _speakers(engines: list[Engine]) -> list[Engine]:
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
