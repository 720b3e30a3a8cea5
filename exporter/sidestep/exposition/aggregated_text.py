"""Pages on which labels are gone: the pod's, and every page where an administrator has chosen so."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import accumulate

from sidestep.catalog.buckets import Bounds
from sidestep.exposition.aggregated_series import Merging, Value
from sidestep.exposition.families import Family
from sidestep.exposition.grouping import Labels
from sidestep.exposition.series_filter import Choice
from sidestep.exposition.text_format import PLACE, frame, header, number, pairs_text, series_text
from sidestep.metrics.histogram import State
from sidestep.metrics.registry import Registry

MAX_TEXTS = 100_000


class Merged(Merging):
    """Writes what is left without the labels and buckets that ``choice`` leaves away."""

    def __init__(self, registry: Registry, choice: Choice) -> None:
        super().__init__(registry, choice)
        self._heads: dict[tuple[str, str, str, bool], bytes] = {}
        self._pairs: dict[Labels, bytes] = {}
        self._frames: dict[tuple[str, Bounds, bool], bytes] = {}
        self._places: dict[tuple[str, Bounds], tuple[int, ...] | None] = {}

    def pieces(
        self, *, openmetrics: bool = False, names: Collection[str] = ()
    ) -> Iterator[list[bytes]]:
        """The page, piece by piece; the registry may change between two of them.

        A family is of one moment; a piece may be empty, where the next one takes a while.
        """
        kept = (self._heads, self._pairs, self._frames, self._places)
        if sum(len(one) for one in kept) > MAX_TEXTS:
            for one in kept:
                one.clear()
        self.refresh()
        for family in self.families(names):
            texts: list[bytes] = []
            is_first = True
            for found in self.series(family):
                if found is None:
                    yield [b"".join(texts)]
                    texts = []
                    continue
                if is_first:
                    texts.append(self._head(family, openmetrics=openmetrics))
                    is_first = False
                texts.append(self._text(family, *found))
            yield texts

    def _head(self, family: Family, *, openmetrics: bool) -> bytes:
        asked = family.name, family.kind, family.help, openmetrics
        known = self._heads.get(asked)
        if known is None:
            name, kind, text, _ = asked
            known = header(name, kind, text, openmetrics=openmetrics).encode()
            self._heads[asked] = known
        return known

    def _text(self, family: Family, labels: Labels, value: Value) -> bytes:
        pairs = self._pairs.get(labels)
        if pairs is None:
            pairs = self._pairs[labels] = pairs_text(dict(labels)).encode()
        if isinstance(value, tuple):
            return self._histogram(family, pairs, value)
        return f"{series_text(family.name, pairs.decode())}{number(value)}\n".encode()

    def samples_of(self, family: Family, value: Value) -> int:
        """Lines of a series."""
        if not isinstance(value, tuple):
            return 1
        bounds = value[0]
        if not bounds:
            return 3 if family.kind == "histogram" else 2
        places = self._shown(family, bounds)
        return 3 + len(bounds if places is None else places)

    def _shown(self, family: Family, bounds: Bounds) -> tuple[int, ...] | None:
        try:
            return self._places[family.name, bounds]
        except KeyError:
            places = self.choice.places(family.name, bounds) if bounds else None
            self._places[family.name, bounds] = places
            return places

    def _histogram(self, family: Family, pairs: bytes, state: State) -> bytes:
        bounds, told, total = state
        labelled = bool(pairs)
        places = self._shown(family, bounds)
        text = self._frames.get((family.name, bounds, labelled))
        if text is None:
            shown = bounds if places is None else tuple(bounds[place] for place in places)
            text = frame(family.name, family.kind, shown, labelled=labelled)
            self._frames[family.name, bounds, labelled] = text
        counts = [*accumulate(told)]
        buckets = counts
        if family.kind == "summary":
            buckets = []
        elif places is not None:
            buckets = [*(counts[place] for place in places), counts[-1]]
        return (text % (*buckets, counts[-1], total)).replace(PLACE, pairs)
