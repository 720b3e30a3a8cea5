"""Copies of scraped families under common names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sidestep.catalog.engine_pages import COMMON_NAMES, CommonName
from sidestep.engines.common_names import FAMILIES, TOKEN_TYPE
from sidestep.exposition.passthrough import parser
from sidestep.exposition.passthrough.families import (
    PageFamily,
    PassthroughSample,
    PassthroughSeries,
)
from sidestep.exposition.passthrough.parser import Labels

NAMES = frozenset(family.name for family in FAMILIES)
_KINDS = {family.name: family.kind for family in FAMILIES}
_HELPS = {family.name: family.help for family in FAMILIES}
MODEL, MODEL_NAME = "model", "model_name"
_BY_SOURCE = {row.source: row for row in COMMON_NAMES}


class CommonCopies:
    """Makes copies of one page's families under common names; series are made once."""

    def __init__(self) -> None:
        self._known: dict[bytes, PassthroughSeries] = {}

    def of(self, families: Iterable[PageFamily]) -> list[PageFamily]:
        """Return the copies, one for each common name; a family of another kind has none."""
        made: dict[str, PageFamily] = {}
        known: dict[bytes, PassthroughSeries] = {}
        for family in families:
            row = _BY_SOURCE.get(family.name)
            if row is None or family.kind != _KINDS[row.name]:
                continue
            copy = made.setdefault(
                row.name, PageFamily(row.name, family.kind, _HELPS[row.name], [], is_common=True)
            )
            copy.samples += self._samples(family.samples, row, known)
        self._known = known
        return list(made.values())

    def _samples(
        self,
        samples: Sequence[PassthroughSample],
        row: CommonName,
        known: dict[bytes, PassthroughSeries],
    ) -> list[PassthroughSample]:
        found: list[PassthroughSample] = []
        for series, value in samples:
            copy = self._known.get(series.key) or _copy(series, row)
            known[series.key] = copy
            found.append((copy, value))
        return _highest(found) if row.process else found


def _highest(samples: Iterable[PassthroughSample]) -> list[PassthroughSample]:
    """Return the highest sample of each series that several processes repeat."""
    highest: dict[bytes, PassthroughSample] = {}
    for sample in samples:
        known = highest.get(sample[0].key)
        if known is None or _number(sample) > _number(known):
            highest[sample[0].key] = sample
    return list(highest.values())


def _number(sample: PassthroughSample) -> float:
    return float(sample[1].split()[0])


def _copy(series: PassthroughSeries, row: CommonName) -> PassthroughSeries:
    """Return ``series`` under the common name, with the common labels."""
    name = row.name + series.name.removeprefix(row.source)
    labels = _labels(series.labels, row)
    text = parser.series_text(name, labels)
    return PassthroughSeries(
        series.raw, name, labels, text, parser.series_text(name, tuple(sorted(labels)))
    )


def _labels(labels: Labels, row: CommonName) -> Labels:
    names = {name for name, _ in labels}
    renamed = tuple(
        (MODEL_NAME if name == MODEL and MODEL_NAME not in names else name, text)
        for name, text in labels
        if text and name not in (TOKEN_TYPE, row.process)
    )
    return (*renamed, (TOKEN_TYPE, row.token_type)) if row.token_type else renamed
