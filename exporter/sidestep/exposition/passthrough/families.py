"""A target's samples by family, in the order of exposition."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from sidestep.catalog.row import OBSERVED
from sidestep.errors import WireError
from sidestep.exposition.passthrough import parser
from sidestep.exposition.passthrough.parser import Comment, Labels, PageKind

MAX_FAMILIES = 1000
_SUFFIXES: dict[PageKind, tuple[str, ...]] = {
    "histogram": ("_bucket", "_count", "_sum"),
    "summary": ("", "_count", "_sum"),
}
"""Suffixes of sample names, in the order of the page."""
_BOUND: dict[PageKind, str] = {"histogram": "le", "summary": "quantile"}


@dataclasses.dataclass(eq=False, slots=True)
class PassthroughSeries:
    """One series of a page.

    Attributes:
        raw: The line on the page, up to the value.
        labels: Exposed labels; values are escaped.
        text: The exposed series, without the blank before the value.
        key: Equal for series that are equal to Prometheus.
    """

    raw: bytes
    name: str
    labels: Labels
    text: bytes
    key: bytes


PassthroughSample = tuple[PassthroughSeries, bytes]
"""A series, and its value and timestamp as the page has them."""


@dataclasses.dataclass(eq=False, slots=True)
class PageFamily:
    """One family of a page; its samples are in the order of exposition.

    Attributes:
        is_common: Whether it is a copy under a common name.
    """

    name: str
    kind: PageKind
    help: str
    samples: list[PassthroughSample]
    is_common: bool = False

    @property
    def names(self) -> AbstractSet[str]:
        """Return the names that the family and its samples can have in the text format."""
        return {self.name, *(self.name + suffix for suffix in _SUFFIXES.get(self.kind, ()))}


class FamilySorter:
    """Sorts the series of one page by family; TYPE lines may be anywhere on it."""

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

    def name_counters_as_samples(self) -> None:
        """Name each counter's family as its samples are; OpenMetrics leaves out ``_total`` there."""
        counters = {
            name: f"{name}_total"
            for name, kind in self._kinds.items()
            if kind == "counter" and not name.endswith("_total")
        }
        self._kinds = {counters.get(name, name): kind for name, kind in self._kinds.items()}
        self._helps = {counters.get(name, name): text for name, text in self._helps.items()}

    def sorted(self, samples: Iterable[PassthroughSample]) -> list[PageFamily]:
        """Return the families of ``samples``: those with a TYPE first."""
        families: list[PageFamily] = []
        taken: set[str] = set()
        for name, found in self._by_family(samples).items():
            kind, text = self._kinds.get(name, "untyped"), self._helps.get(name, "")
            family = PageFamily(name, kind, text, found)
            reason = ""
            if name in self._excluded:
                reason = "excluded"
            elif not taken.isdisjoint(family.names):
                reason = "name_clash"
            elif len(families) >= MAX_FAMILIES:
                reason = "over_limit"
            elif found:
                taken |= family.names
                if kind in OBSERVED:
                    family.samples = self._ordered(family)
                families.append(family)
            if reason:
                self.left_out[reason] += len(found)
        return [family for family in families if family.samples]

    def _by_family(
        self, samples: Iterable[PassthroughSample]
    ) -> dict[str, list[PassthroughSample]]:
        """Return the samples by family, without duplicate series."""
        found: dict[str, list[PassthroughSample]] = {name: [] for name in self._kinds}
        known: dict[str, list[PassthroughSample]] = {}
        """The same lists by sample name."""
        seen: set[bytes] = set()
        for sample in samples:
            series, _ = sample
            if series.key in seen:
                self.left_out["duplicate"] += 1
                continue
            seen.add(series.key)
            of_name = known.get(series.name)
            if of_name is None:
                of_name = found.setdefault(self._family_of(series.name), [])
                known[series.name] = of_name
            of_name.append(sample)
        return found

    def _family_of(self, sample: str) -> str:
        if sample not in self._kinds:
            for suffix in ("_bucket", "_count", "_sum"):
                base = sample.removesuffix(suffix)
                if base != sample and suffix in _SUFFIXES.get(self._kinds.get(base, "untyped"), ()):
                    return base
        return sample

    def _ordered(self, family: PageFamily) -> list[PassthroughSample]:
        """Return the samples in exposition order: one histogram or summary after the other."""
        groups: dict[Labels, list[tuple[int, float, int]]] = {}
        for number, (series, _) in enumerate(family.samples):
            rank = _rank(family, series)
            if rank is None:
                self.left_out["odd_sample"] += 1
            else:
                labels = group_labels(family.kind, series.labels)
                groups.setdefault(labels, []).append((*rank, number))
        found: list[PassthroughSample] = []
        for group in groups.values():
            found += [family.samples[number] for *_, number in sorted(group)]
        return found


def _rank(family: PageFamily, series: PassthroughSeries) -> tuple[int, float] | None:
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
