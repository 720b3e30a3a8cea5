"""Families of all passthrough pages, one block per name; the first page wins conflicts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from sidestep.catalog.layout import OWN_PREFIXES, exposed_names
from sidestep.catalog.model import OBSERVED
from sidestep.exposition.passthrough.families import PageFamily, Sample, group_labels
from sidestep.exposition.passthrough.page import PART, Page, ParsedPage, Part, make_parts
from sidestep.exposition.passthrough.parser import Labels, PageKind

SLICE = 50
"""Families to merge before yielding to the event loop."""

Key = bytes | Labels


@dataclasses.dataclass(eq=False, slots=True)
class PassthroughFamily:
    """One family, merged from all pages that have it.

    Attributes:
        names: All sample names that it takes, as ``layout.taken`` returns them.
        is_common: Whether it is a copy under a common name.
        is_openmetrics: Whether OpenMetrics can have it: there a name may belong to several
            families, as ``x_created`` is a part of ``x``.
    """

    name: str
    kind: PageKind
    help: str
    names: frozenset[str]
    parts: list[Part]
    is_openmetrics: bool = True
    is_common: bool = False


@dataclasses.dataclass(eq=False, slots=True)
class _Claim:
    """A family as merged from the pages so far.

    Attributes:
        pages: The family as each page has it.
    """

    family: PassthroughFamily
    pages: dict[int, PageFamily]


class _MergedPages:
    """Merged content of all pages."""

    def __init__(self) -> None:
        self.families: list[PassthroughFamily] = []
        self.left_out: dict[int, Counter[str]] = {}
        """By page: samples that another page exposes."""


class PassthroughRegistry:
    """All passthrough pages.

    Args:
        own_names: Returns the names that the exporter's own families take.
        common: Whether families have copies under common names.
    """

    def __init__(
        self, own_names: Callable[[], Iterable[AbstractSet[str]]], *, common: bool = False
    ) -> None:
        self._own_names = own_names
        self._common = common
        self._pages: list[Page] = []
        self._overlapping: list[frozenset[int]] = []
        """By page: earlier pages that can have a sample equal to one of its own."""
        self._merged_contents: list[ParsedPage | None] = []
        """The pages' content in ``_merged``."""
        self._merged = _MergedPages()

    def page(self, labels: Labels = (), excluded: Collection[str] = (), name: str = "") -> Page:
        """Add a page; see ``Page``."""
        page = Page(name, labels, excluded, self._merge, self._forget, common=self._common)
        overlapping = [
            i for i, one in enumerate(self._pages) if not _are_disjoint(page.labels, one.labels)
        ]
        self._overlapping.append(frozenset(overlapping))
        self._pages.append(page)
        return page

    def families(self, names: Collection[str] = ()) -> list[PassthroughFamily]:
        """Return the exposed families: all, or those with one of the sample ``names``."""
        if not self._merged.families:
            return []
        own_names = list(self._own_names())
        return [
            family
            for family in self._merged.families
            if (not names or not family.names.isdisjoint(names))
            and not _is_own(family, own_names)
            and family.parts
        ]

    def texts(self, names: Collection[str]) -> dict[str, str]:
        """Return, by the name of the page, its exposed families with one of the sample ``names``."""
        found: dict[str, list[bytes]] = {}
        for family in self.families(names):
            for part in family.parts:
                if part.page.name:
                    found.setdefault(part.page.name, []).append(part.text(openmetrics=False))
        return {name: b"".join(texts).decode() for name, texts in found.items()}

    def left_out(self, page: Page) -> Counter[str]:
        """Return the samples of ``page`` that are not exposed, by reason."""
        if page.parsed is None:
            return Counter()
        own_names = list(self._own_names())
        lost = sum(
            len(part.samples)
            for family in self._merged.families
            for part in family.parts
            if part.page is page and _is_own(family, own_names)
        )
        others = self._merged.left_out.get(self._pages.index(page), Counter())
        return page.parsed.left_out + others + Counter(ours=lost)

    def _forget(self, page: Page) -> None:
        """Drop ``page``; after its next poll, another page exposes a sample it shared."""
        self._merged_contents = []
        for family in self._merged.families:
            family.parts = [part for part in family.parts if part.page is not page]

    def _merge(self) -> Iterator[None]:
        """Merge all pages until the result is up to date."""
        while (contents := [page.parsed for page in self._pages]) != self._merged_contents:
            merged = yield from self._merge_pages(contents)
            if contents == [page.parsed for page in self._pages]:
                self._merged, self._merged_contents = merged, contents

    def _merge_pages(
        self, contents: Sequence[ParsedPage | None]
    ) -> Generator[None, None, _MergedPages]:
        """Merge families by name; in a conflict the first page's stays."""
        claims: dict[str, _Claim] = {}
        owners: dict[str, str] = {}
        merged = _MergedPages()
        for at, parsed in enumerate(contents):
            if parsed is None:
                continue
            left_out = merged.left_out[at] = Counter()
            for number, (found, parts) in enumerate(parsed.families):
                claim = claims.get(found.name)
                has_owner = any(owners.get(name, found.name) != found.name for name in found.names)
                if has_owner or (claim is not None and claim.family.kind != found.kind):
                    left_out["other_target"] += len(found.samples)
                    continue
                if claim is None:
                    claim = claims[found.name] = _Claim(_family(found), {})
                    owners.update(dict.fromkeys(found.names, found.name))
                visible = yield from self._visible(at, found, parts, claim)
                claim.pages[at] = found
                claim.family.parts += visible
                shown = sum(len(part.samples) for part in visible)
                left_out["other_target"] += len(found.samples) - shown
                if not number % SLICE:
                    yield
        merged.families = [claim.family for claim in claims.values()]
        _mark_openmetrics(merged.families)
        return merged

    def _visible(
        self, at: int, found: PageFamily, parts: list[Part], claim: _Claim
    ) -> Generator[None, None, list[Part]]:
        """Return the samples of ``found`` that no earlier page exposes."""
        overlapping = self._overlapping[at] & claim.pages.keys()
        if not overlapping:
            return parts
        known: set[Key] = set()
        for rival in overlapping:
            for keys in _keys(claim.pages[rival]):
                known.update(keys)
                yield
        left: list[Sample] = []
        samples = iter(found.samples)
        for keys in _keys(found):
            left += [one for key, one in zip(keys, samples, strict=False) if key not in known]
            yield
        if len(left) == len(found.samples):
            return parts
        return (yield from make_parts(self._pages[at], left))


def _keys(found: PageFamily) -> Iterator[list[Key]]:
    """Yield the keys of the samples in ``found``, in order, some at a time.

    All samples of a histogram have the same key, so that one cannot come from several pages.
    """
    for start in range(0, len(found.samples), PART):
        some = [series for series, _ in found.samples[start : start + PART]]
        if found.kind in OBSERVED:
            yield [group_labels(found.kind, series.labels) for series in some]
        else:
            yield [series.key for series in some]


def _family(found: PageFamily) -> PassthroughFamily:
    kind = "gauge" if found.kind == "untyped" else found.kind
    return PassthroughFamily(
        found.name,
        found.kind,
        found.help,
        exposed_names(found.name, kind),
        [],
        is_common=found.is_common,
    )


def _are_disjoint(labels: Labels, others: Labels) -> bool:
    """Return whether samples with these labels and with the others always differ."""
    known = dict(others)
    return any(known.get(name, text) != text for name, text in labels)


def _mark_openmetrics(families: Iterable[PassthroughFamily]) -> None:
    """Mark the families that OpenMetrics can have: there a family can take more names."""
    owned: set[str] = set()
    for family in sorted(families, key=lambda family: family.name.endswith("_created")):
        names = family.names
        if family.kind == "counter" and not family.name.endswith("_total"):
            names = frozenset({family.name})
        family.is_openmetrics = owned.isdisjoint(names)
        if family.is_openmetrics:
            owned |= names


def _is_own(family: PassthroughFamily, own_names: Iterable[AbstractSet[str]]) -> bool:
    has_own_prefix = family.name.startswith(OWN_PREFIXES) and not family.is_common
    return has_own_prefix or not all(map(family.names.isdisjoint, own_names))
