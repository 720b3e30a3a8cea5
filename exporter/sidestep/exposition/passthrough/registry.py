"""The families of all pages that are passed on, one block a name: who shows what two of them have."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from sidestep.catalog.layout import exposed_names
from sidestep.catalog.model import OBSERVED
from sidestep.exposition.passthrough.families import Found, outer
from sidestep.exposition.passthrough.page import PART, Family, Moment, Page, Part, Plan, made_parts
from sidestep.exposition.passthrough.parser import Labels, PageKind

EXPORTERS = ("sidestep_", "process_", "python_")
"""How the exporter's own names begin."""
SLICE = 50
"""Families that are merged between two turns of the loop."""

Key = bytes | Labels


@dataclasses.dataclass(eq=False, slots=True)
class PassedFamily:
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
    def shown(self) -> list[Part]:
        """The parts of pages that are."""
        return [part for part in self.parts if part.plan.page.plan is not None]


@dataclasses.dataclass(eq=False, slots=True)
class _Claim:
    """A family as those pages have it that came first.

    Attributes:
        places: By page, where it has samples.
    """

    family: PassedFamily
    places: dict[int, Found]


class _Merge:
    """What is on all pages, put together."""

    def __init__(self) -> None:
        self.families: list[PassedFamily] = []
        self.left_out: dict[int, Counter[str]] = {}
        """By page: samples that another shows."""


class Passed:
    """All pages.

    Args:
        ours: The names that the exporter's own families take.
    """

    def __init__(self, ours: Callable[[], Iterable[AbstractSet[str]]]) -> None:
        self._ours = ours
        self._pages: list[Page] = []
        self._rivals: list[frozenset[int]] = []
        """By page: those before it that can have a sample equal to one of it."""
        self._plans: list[Plan | None] = []
        """What is put together in ``_merged``."""
        self._merged = _Merge()
        self._merges = 0

    @property
    def version(self) -> int:
        """Changes with what is on the pages, so that a text can be reused."""
        return self._merges + sum(page.changes for page in self._pages)

    @property
    def moment(self) -> Moment:
        """The values of now: what is shown of one page shall be of one time."""
        return {part.plan: part.plan.values for f in self._merged.families for part in f.shown}

    def page(self, labels: Labels = (), excluded: Collection[str] = ()) -> Page:
        """One more; see ``Page``."""
        page = Page(labels, excluded, self._merge, self._forget)
        rivals = [i for i, one in enumerate(self._pages) if not _are_apart(page.labels, one.labels)]
        self._rivals.append(frozenset(rivals))
        self._pages.append(page)
        return page

    def families(self, names: Collection[str] = ()) -> list[PassedFamily]:
        """Those that are shown, all or those that have one of the sample ``names``."""
        if not self._merged.families:
            return []
        ours = list(self._ours())
        return [
            family
            for family in self._merged.families
            if (not names or not family.names.isdisjoint(names))
            and not _is_ours(family, ours)
            and family.shown
        ]

    def left_out(self, page: Page) -> Counter[str]:
        """What is on ``page`` and not shown, by reason."""
        if page.plan is None:
            return Counter()
        ours = list(self._ours())
        lost = sum(
            len(part.series)
            for family in self._merged.families
            for part in family.parts
            if part.plan is page.plan and _is_ours(family, ours)
        )
        others = self._merged.left_out.get(self._pages.index(page), Counter())
        return page.plan.left_out + others + Counter(ours=lost)

    def _forget(self, page: Page) -> None:
        """Keep nothing of ``page``; what it had before others is theirs with the next poll."""
        self._plans = []
        for family in self._merged.families:
            family.parts = [part for part in family.parts if part.plan.page is not page]

    def _merge(self) -> Iterator[None]:
        """Put together what is on all pages, until it is what they have now."""
        while (plans := [page.plan for page in self._pages]) != self._plans:
            self._merged = yield from self._merged_of(plans)
            self._plans = plans
            self._merges += 1

    def _merged_of(self, plans: Sequence[Plan | None]) -> Generator[None, None, _Merge]:
        """One block for each family; of two that cannot be one the first page's stays."""
        claims: dict[str, _Claim] = {}
        owners: dict[str, str] = {}
        merged = _Merge()
        for at, plan in enumerate(plans):
            if plan is None:
                continue
            left_out = merged.left_out[at] = Counter()
            for number, family in enumerate(plan.families):
                found = family.found
                claim = claims.get(found.name)
                has_owner = any(owners.get(name, found.name) != found.name for name in found.names)
                if has_owner or (claim is not None and claim.family.kind != found.kind):
                    left_out["other_target"] += len(found.places)
                    continue
                if claim is None:
                    claim = claims[found.name] = _Claim(_family(found), {})
                    owners.update(dict.fromkeys(found.names, found.name))
                parts = yield from self._parts(plans, at, family, claim)
                claim.places[at] = found
                claim.family.parts += parts
                shown = sum(len(part.series) for part in parts)
                left_out["other_target"] += len(found.places) - shown
                if not number % SLICE:
                    yield
        merged.families = [claim.family for claim in claims.values()]
        _choose(merged.families)
        return merged

    def _parts(
        self, plans: Sequence[Plan | None], at: int, family: Family, claim: _Claim
    ) -> Generator[None, None, list[Part]]:
        """The samples of ``family`` that no page before has shown."""
        plan = plans[at]
        rivals = self._rivals[at] & claim.places.keys()
        if plan is None or not rivals:
            return family.parts
        known: set[Key] = set()
        for rival in rivals:
            for keys in _keys(plans[rival], claim.places[rival]):
                known.update(keys)
                yield
        left: list[int] = []
        places = iter(family.found.places)
        for keys in _keys(plan, family.found):
            left += [place for key, place in zip(keys, places, strict=False) if key not in known]
            yield
        if len(left) == len(family.found.places):
            return family.parts
        return (yield from made_parts(plan, left))


def _keys(plan: Plan | None, found: Found) -> Iterator[list[Key]]:
    """What tells the samples of ``found`` apart, some at a time, in their order.

    Of a histogram it is the same for all: one cannot be from several pages.
    """
    if plan is None:
        return
    for start in range(0, len(found.places), PART):
        some = [plan.order[place] for place in found.places[start : start + PART]]
        if found.kind in OBSERVED:
            yield [outer(found.kind, series.labels) for series in some if series is not None]
        else:
            yield [series.key for series in some if series is not None]


def _family(found: Found) -> PassedFamily:
    kind = "gauge" if found.kind == "untyped" else found.kind
    return PassedFamily(found.name, found.kind, found.help, exposed_names(found.name, kind), [])


def _are_apart(labels: Labels, others: Labels) -> bool:
    """Whether no sample with the ones can be equal to one with the others."""
    known = dict(others)
    return any(known.get(name, text) != text for name, text in labels)


def _choose(families: Iterable[PassedFamily]) -> None:
    """Which families OpenMetrics can have, where one takes more names than it shows."""
    owned: set[str] = set()
    for family in sorted(families, key=lambda family: family.name.endswith("_created")):
        names = family.names
        if family.kind == "counter" and not family.name.endswith("_total"):
            names = frozenset({family.name})
        family.is_openmetrics = owned.isdisjoint(names)
        if family.is_openmetrics:
            owned |= names


def _is_ours(family: PassedFamily, ours: Iterable[AbstractSet[str]]) -> bool:
    return family.name.startswith(EXPORTERS) or not all(map(family.names.isdisjoint, ours))
