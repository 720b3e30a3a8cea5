"""Sorting of a target's series into families, in the order of exposition."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Generator, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from sidestep.catalog.model import OBSERVED
from sidestep.errors import WireError
from sidestep.exposition.passthrough import parser
from sidestep.exposition.passthrough.parser import Comment, Labels, PageKind

SLICE = 200
"""Series to sort before yielding to the event loop."""
MAX_FAMILIES = 1000
MAX_SORTED = 1000
_SUFFIXES: dict[PageKind, tuple[str, ...]] = {
    "histogram": ("_bucket", "_count", "_sum"),
    "summary": ("", "_count", "_sum"),
}
"""Suffixes of sample names, in the order of the page."""
_BOUND: dict[PageKind, str] = {"histogram": "le", "summary": "quantile"}


class Sample(Protocol):
    """The part of a series that sorting needs."""

    name: str
    labels: Labels
    key: bytes


@dataclasses.dataclass(eq=False, slots=True)
class FamilyLines:
    """One family of a page.

    Attributes:
        line_numbers: Lines of its samples, in the order of exposition.
    """

    name: str
    kind: PageKind
    help: str
    line_numbers: list[int] = dataclasses.field(default_factory=list)

    @property
    def names(self) -> AbstractSet[str]:
        """Return the names that the family and its samples can have in the text format."""
        return {self.name, *(self.name + suffix for suffix in _SUFFIXES.get(self.kind, ()))}


class FamilySorter:
    """Sorts the series of one page by family; TYPE lines may be anywhere on it.

    Args:
        left_out: Counter of left-out samples by reason.
        excluded: Families to leave out.
    """

    def __init__(self, left_out: Counter[str], excluded: AbstractSet[str]) -> None:
        self.left_out = left_out
        self._excluded = excluded
        self._kinds: dict[str, PageKind] = {}
        self._helps: dict[str, str] = {}

    def comment(self, found: Comment | None) -> None:
        """Record a HELP or TYPE line; the first one of a family counts."""
        if found is None:
            return
        if not found.is_type:
            self._helps.setdefault(found.name, found.text)
            return
        kind = parser.KINDS[found.text]
        if self._kinds.setdefault(found.name, kind) != kind:
            self.left_out["second_type"] += 1

    def sorted(self, order: Sequence[Sample | None]) -> Generator[None, None, list[FamilyLines]]:
        """Return the families of the series in ``order``: those with a TYPE first."""
        samples = yield from self._by_family(order)
        families: list[FamilyLines] = []
        taken: set[str] = set()
        for number, (name, line_numbers) in enumerate(samples.items()):
            if not number % SLICE:
                yield
            family = FamilyLines(name, self._kinds.get(name, "untyped"), self._helps.get(name, ""))
            reason = ""
            if name in self._excluded:
                reason = "excluded"
            elif not taken.isdisjoint(family.names):
                reason = "name_clash"
            elif len(families) >= MAX_FAMILIES:
                reason = "over_limit"
            elif line_numbers:
                taken |= family.names
                family.line_numbers = yield from self._ordered(family, order, line_numbers)
                families.append(family)
            if reason:
                self.left_out[reason] += len(line_numbers)
        return [family for family in families if family.line_numbers]

    def _by_family(
        self, order: Sequence[Sample | None]
    ) -> Generator[None, None, dict[str, list[int]]]:
        """Return line numbers by family, without duplicate series."""
        found: dict[str, list[int]] = {name: [] for name in self._kinds}
        known: dict[str, list[int]] = {}
        """The same lists by sample name."""
        seen: set[bytes] = set()
        for at, series in enumerate(order):
            if series is not None:
                if series.key in seen:
                    self.left_out["duplicate"] += 1
                    continue
                seen.add(series.key)
                line_numbers = known.get(series.name)
                if line_numbers is None:
                    line_numbers = found.setdefault(self._family_of(series.name), [])
                    known[series.name] = line_numbers
                line_numbers.append(at)
            if not at % (SLICE * 5):
                yield
        return found

    def _family_of(self, sample: str) -> str:
        if sample not in self._kinds:
            for suffix in ("_bucket", "_count", "_sum"):
                base = sample.removesuffix(suffix)
                if base != sample and suffix in _SUFFIXES.get(self._kinds.get(base, "untyped"), ()):
                    return base
        return sample

    def _ordered(
        self, family: FamilyLines, order: Sequence[Sample | None], line_numbers: list[int]
    ) -> Generator[None, None, list[int]]:
        """Return the lines in exposition order: one histogram or summary after the other."""
        if family.kind not in OBSERVED:
            return line_numbers
        groups: dict[Labels, list[tuple[int, float, int]]] = {}
        for number, at in enumerate(line_numbers):
            series = order[at]
            if series is not None:
                rank = _rank(family, series)
                if rank is None:
                    self.left_out["odd_sample"] += 1
                else:
                    groups.setdefault(group_labels(family.kind, series.labels), []).append(
                        (*rank, at)
                    )
            if not number % SLICE:
                yield
        found: list[int] = []
        for group in groups.values():
            # No real histogram has more, and sorting a malicious one would take long.
            if len(group) <= MAX_SORTED:
                group.sort()
            found += [at for *_, at in group]
            yield
        return found


def _rank(family: FamilyLines, series: Sample) -> tuple[int, float] | None:
    """Return the rank of a sample within its histogram or summary; None if it does not fit."""
    suffixes = _SUFFIXES[family.kind]
    suffix = series.name.removeprefix(family.name)
    if suffix not in suffixes:
        return None
    if suffix != suffixes[0]:
        return suffixes.index(suffix), 0.0
    text = dict(series.labels).get(_BOUND[family.kind], "")
    try:
        bound = float(parser.parse_value(text.encode()))
    except (WireError, ValueError):
        return None
    return None if math.isnan(bound) else (0, bound)


def group_labels(kind: PageKind, labels: Labels) -> Labels:
    """Return the labels that the samples of one histogram or summary share."""
    return tuple(sorted(pair for pair in labels if pair[1] and pair[0] != _BOUND[kind]))
