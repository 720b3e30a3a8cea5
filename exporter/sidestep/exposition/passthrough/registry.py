"""Families of all passthrough pages, one block per name; the first page wins conflicts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from sidestep.catalog.layout import OWN_PREFIXES, exposed_names
from sidestep.catalog.row import OBSERVED
from sidestep.exposition.passthrough.families import PageFamily, PassthroughSample, group_labels
from sidestep.exposition.passthrough.page import Page, ParsedPage
from sidestep.exposition.passthrough.parser import Labels, PageKind

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
    of_pages: list[tuple[Page, list[PassthroughSample]]]
    is_openmetrics: bool = True
    is_common: bool = False

    @property
    def samples(self) -> list[PassthroughSample]:
        """Return the samples of all pages."""
        return [sample for _, samples in self.of_pages for sample in samples]


class _MergedPages:
    """Merged content of all pages."""

    def __init__(self) -> None:
        self.families: list[PassthroughFamily] = []
        self.left_out: dict[int, Counter[str]] = {}
        """By page: samples that another page exposes."""


class PassthroughRegistry:
    """All passthrough pages."""

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
        page = Page(name, labels, excluded, self.merge, self._forget, common=self._common)
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
            and family.of_pages
        ]

    def texts(self, names: Collection[str]) -> dict[str, str]:
        """Return, by the name of the page, its exposed families with one of the sample ``names``."""
        found: dict[str, list[bytes]] = {}
        for family in self.families(names):
            for page, samples in family.of_pages:
                if page.name:
                    lines = [b"%b %b\n" % (series.text, value) for series, value in samples]
                    found.setdefault(page.name, []).extend(lines)
        return {name: b"".join(texts).decode() for name, texts in found.items()}

    def left_out(self, page: Page) -> Counter[str]:
        """Return the samples of ``page`` that are not exposed, by reason."""
        if page.parsed is None:
            return Counter()
        own_names = list(self._own_names())
        lost = sum(
            len(samples)
            for family in self._merged.families
            for owner, samples in family.of_pages
            if owner is page and _is_own(family, own_names)
        )
        others = self._merged.left_out.get(self._pages.index(page), Counter())
        return page.parsed.left_out + others + Counter(ours=lost)

    def _forget(self, page: Page) -> None:
        """Drop ``page``; after its next poll, another page exposes a sample it shared."""
        self._merged_contents = []
        # Pages that are being written still use the former families.
        self._merged.families = [
            dataclasses.replace(
                one, of_pages=[each for each in one.of_pages if each[0] is not page]
            )
            for one in self._merged.families
        ]

    def merge(self) -> None:
        """Merge all pages until the result is up to date; the event loop may change pages meanwhile."""
        while (contents := [page.parsed for page in self._pages]) != self._merged_contents:
            merged = self._merge_pages(contents)
            if contents == [page.parsed for page in self._pages]:
                self._merged, self._merged_contents = merged, contents

    def _merge_pages(self, contents: Sequence[ParsedPage | None]) -> _MergedPages:
        """Merge families by name; in a conflict the first page's stays."""
        families: dict[str, PassthroughFamily] = {}
        of_pages: dict[str, dict[int, PageFamily]] = {}
        owners: dict[str, str] = {}
        merged = _MergedPages()
        for at, parsed in enumerate(contents):
            if parsed is None:
                continue
            left_out = merged.left_out[at] = Counter()
            for found in parsed.families:
                family = families.get(found.name)
                has_owner = any(owners.get(name, found.name) != found.name for name in found.names)
                if has_owner or (family is not None and family.kind != found.kind):
                    left_out["other_target"] += len(found.samples)
                    continue
                if family is None:
                    family = families[found.name] = _family(found)
                    owners.update(dict.fromkeys(found.names, found.name))
                others = of_pages.setdefault(found.name, {})
                visible = self._visible(at, found, others)
                others[at] = found
                if visible:
                    family.of_pages.append((self._pages[at], visible))
                left_out["other_target"] += len(found.samples) - len(visible)
        merged.families = [*families.values()]
        _mark_openmetrics(merged.families)
        return merged

    def _visible(
        self, at: int, found: PageFamily, others: Mapping[int, PageFamily]
    ) -> list[PassthroughSample]:
        """Return the samples of ``found`` that no earlier page exposes."""
        overlapping = self._overlapping[at] & others.keys()
        if not overlapping:
            return found.samples
        known: set[Key] = set()
        for rival in overlapping:
            known.update(_keys(others[rival]))
        return [
            one for key, one in zip(_keys(found), found.samples, strict=True) if key not in known
        ]


def _keys(found: PageFamily) -> Iterator[Key]:
    """Yield the keys of the samples in ``found``, in order.

    All samples of a histogram have the same key, so that one cannot come from several pages.
    """
    if found.kind in OBSERVED:
        return (group_labels(found.kind, series.labels) for series, _ in found.samples)
    return (series.key for series, _ in found.samples)


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
