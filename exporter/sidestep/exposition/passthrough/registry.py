"""The families of all pages that are passed on, one block a name: who shows what two of them have."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from sidestep.catalog.layout import taken
from sidestep.catalog.model import OBSERVED
from sidestep.exposition.passthrough.families import FamilyLines, group_labels
from sidestep.exposition.passthrough.page import (
    PART,
    Family,
    Page,
    PageValues,
    ParsedPage,
    Part,
    make_parts,
)
from sidestep.exposition.passthrough.parser import Labels, PageKind

OWN_PREFIXES = ("sidestep_", "process_", "python_")
"""How the exporter's own names begin."""
SLICE = 50
"""Families that are merged between two turns of the loop."""

Key = bytes | Labels


@dataclasses.dataclass(eq=False, slots=True)
class PassthroughFamily:
    """One family, of all pages that have it.

    Attributes:
        names: All that it takes, as ``plan.taken`` has them.
        is_openmetrics: Whether it can be shown in that format, where a name may belong to
            several families: ``x_created`` is a part of ``x`` there.
    """

    name: str
    kind: PageKind
    help: str
    names: frozenset[str]
    parts: list[Part]
    is_openmetrics: bool = True

    @property
    def visible_parts(self) -> list[Part]:
        """The parts of pages that are."""
        return [part for part in self.parts if part.parsed.page.parsed is not None]


@dataclasses.dataclass(eq=False, slots=True)
class _Claim:
    """A family as those pages have it that came first.

    Attributes:
        places: By page, where it has samples.
    """

    family: PassthroughFamily
    line_numbers: dict[int, FamilyLines]


class _MergedPages:
    """What is on all pages, put together."""

    def __init__(self) -> None:
        self.families: list[PassthroughFamily] = []
        self.left_out: dict[int, Counter[str]] = {}
        """By page: samples that another shows."""


class PassthroughRegistry:
    """All pages.

    Args:
        ours: The names that the exporter's own families take.
    """

    def __init__(self, own_names: Callable[[], Iterable[AbstractSet[str]]]) -> None:
        self._own_names = own_names
        self._pages: list[Page] = []
        self._overlapping: list[frozenset[int]] = []
        """By page: those before it that can have a sample equal to one of it."""
        self._plans: list[ParsedPage | None] = []
        """What is put together in ``_merged``."""
        self._merged = _MergedPages()
        self._merges = 0

    @property
    def version(self) -> int:
        """Changes with what is on the pages, so that a text can be reused."""
        return self._merges + sum(page.changes for page in self._pages)

    @property
    def page_values(self) -> PageValues:
        """The values of now: what is shown of one page shall be of one time."""
        return {
            part.parsed: part.parsed.values
            for f in self._merged.families
            for part in f.visible_parts
        }

    def page(self, labels: Labels = (), excluded: Collection[str] = ()) -> Page:
        """One more; see ``Page``."""
        page = Page(labels, excluded, self._merge, self._forget)
        overlapping = [
            i for i, one in enumerate(self._pages) if not _are_disjoint(page.labels, one.labels)
        ]
        self._overlapping.append(frozenset(overlapping))
        self._pages.append(page)
        return page

    def families(self, names: Collection[str] = ()) -> list[PassthroughFamily]:
        """Those that are shown, all or those that have one of the sample ``names``."""
        if not self._merged.families:
            return []
        own_names = list(self._own_names())
        return [
            family
            for family in self._merged.families
            if (not names or not family.names.isdisjoint(names))
            and not _is_own(family, own_names)
            and family.visible_parts
        ]

    def left_out(self, page: Page) -> Counter[str]:
        """What is on ``page`` and not shown, by reason."""
        if page.parsed is None:
            return Counter()
        own_names = list(self._own_names())
        lost = sum(
            len(part.series)
            for family in self._merged.families
            for part in family.parts
            if part.parsed is page.parsed and _is_own(family, own_names)
        )
        others = self._merged.left_out.get(self._pages.index(page), Counter())
        return page.parsed.left_out + others + Counter(ours=lost)

    def _forget(self, page: Page) -> None:
        """Keep nothing of ``page``; what it had before others is theirs with the next poll."""
        self._plans = []
        for family in self._merged.families:
            family.parts = [part for part in family.parts if part.parsed.page is not page]

    def _merge(self) -> Iterator[None]:
        """Put together what is on all pages, until it is what they have now."""
        while (plans := [page.parsed for page in self._pages]) != self._plans:
            self._merged = yield from self._merge_pages(plans)
            self._plans = plans
            self._merges += 1

    def _merge_pages(
        self, plans: Sequence[ParsedPage | None]
    ) -> Generator[None, None, _MergedPages]:
        """One block for each family; of two that cannot be one the first page's stays."""
        claims: dict[str, _Claim] = {}
        owners: dict[str, str] = {}
        merged = _MergedPages()
        for at, parsed in enumerate(plans):
            if parsed is None:
                continue
            left_out = merged.left_out[at] = Counter()
            for number, family in enumerate(parsed.families):
                found = family.found
                claim = claims.get(found.name)
                has_owner = any(owners.get(name, found.name) != found.name for name in found.names)
                if has_owner or (claim is not None and claim.family.kind != found.kind):
                    left_out["other_target"] += len(found.line_numbers)
                    continue
                if claim is None:
                    claim = claims[found.name] = _Claim(_family(found), {})
                    owners.update(dict.fromkeys(found.names, found.name))
                parts = yield from self._parts(plans, at, family, claim)
                claim.line_numbers[at] = found
                claim.family.parts += parts
                visible_parts = sum(len(part.series) for part in parts)
                left_out["other_target"] += len(found.line_numbers) - visible_parts
                if not number % SLICE:
                    yield
        merged.families = [claim.family for claim in claims.values()]
        _mark_openmetrics(merged.families)
        return merged

    def _parts(
        self, plans: Sequence[ParsedPage | None], at: int, family: Family, claim: _Claim
    ) -> Generator[None, None, list[Part]]:
        """The samples of ``family`` that no page before has shown."""
        parsed = plans[at]
        overlapping = self._overlapping[at] & claim.line_numbers.keys()
        if parsed is None or not overlapping:
            return family.parts
        known: set[Key] = set()
        for rival in overlapping:
            for keys in _keys(plans[rival], claim.line_numbers[rival]):
                known.update(keys)
                yield
        left: list[int] = []
        line_numbers = iter(family.found.line_numbers)
        for keys in _keys(parsed, family.found):
            left += [
                place for key, place in zip(keys, line_numbers, strict=False) if key not in known
            ]
            yield
        if len(left) == len(family.found.line_numbers):
            return family.parts
        return (yield from make_parts(parsed, left))


def _keys(parsed: ParsedPage | None, found: FamilyLines) -> Iterator[list[Key]]:
    """What tells the samples of ``found`` apart, some at a time, in their order.

    Of a histogram it is the same for all: one cannot be from several pages.
    """
    if parsed is None:
        return
    for start in range(0, len(found.line_numbers), PART):
        some = [parsed.order[place] for place in found.line_numbers[start : start + PART]]
        if found.kind in OBSERVED:
            yield [group_labels(found.kind, series.labels) for series in some if series is not None]
        else:
            yield [series.key for series in some if series is not None]


def _family(found: FamilyLines) -> PassthroughFamily:
    kind = "gauge" if found.kind == "untyped" else found.kind
    return PassthroughFamily(found.name, found.kind, found.help, taken(found.name, kind), [])


def _are_disjoint(labels: Labels, others: Labels) -> bool:
    """Whether no sample with the ones can be equal to one with the others."""
    known = dict(others)
    return any(known.get(name, text) != text for name, text in labels)


def _mark_openmetrics(families: Iterable[PassthroughFamily]) -> None:
    """Which families OpenMetrics can have, where one takes more names than it shows."""
    owned: set[str] = set()
    for family in sorted(families, key=lambda family: family.name.endswith("_created")):
        names = family.names
        if family.kind == "counter" and not family.name.endswith("_total"):
            names = frozenset({family.name})
        family.is_openmetrics = owned.isdisjoint(names)
        if family.is_openmetrics:
            owned |= names


def _is_own(family: PassthroughFamily, own_names: Iterable[AbstractSet[str]]) -> bool:
    return family.name.startswith(OWN_PREFIXES) or not all(map(family.names.isdisjoint, own_names))
