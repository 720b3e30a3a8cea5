"""Plain sums of the pushed items, with which the exporter's page is compared.

Nothing here uses the exporter's own arithmetic. All values are multiples of 1/1024,
whose sums are exact in any order, so pages are compared for equality.
"""

from __future__ import annotations

from collections.abc import Mapping

from sidestep.catalog.buckets import DEFAULTS, one_two_five

MAX_MODEL_LEN = 8192
Labels = tuple[tuple[str, str], ...]
Series = tuple[str, Labels]

BOUNDS: Mapping[str, tuple[float, ...]] = {
    **DEFAULTS,
    "request_tokens": one_two_five(MAX_MODEL_LEN),
    "held_tokens": (0.0, 128.0, 512.0, 2048.0),
    "chaos_wait": (0.125, 0.5, 1.0, 4.0),
}
"""Bucket families as these engines announce them, without a bound of 1e6, which has two spellings."""


class Tally:
    """Counters and histograms by name and labels."""

    def __init__(self) -> None:
        self.counters: dict[Series, int] = {}
        self.histograms: dict[Series, _Buckets] = {}

    def count(self, name: str, amount: int, *labels: tuple[str, str]) -> None:
        """Add to a counter."""
        series = (name, labels)
        self.counters[series] = self.counters.get(series, 0) + amount

    def observe(self, name: str, family: str, *values: float) -> None:
        """Count each value in the first bucket whose bound it does not exceed."""
        found = self._histogram((name, ()), family)
        for value in values:
            place = 0
            while place < len(found.bounds) and value > found.bounds[place]:
                place += 1
            found.counts[place] += 1
            found.sum += value

    def add(self, other: Tally, times: int = 1) -> None:
        """Add ``other`` so many times."""
        if not times:
            return
        for series, amount in other.counters.items():
            self.counters[series] = self.counters.get(series, 0) + amount * times
        for series, more in other.histograms.items():
            found = self._histogram(series, more.family)
            for place, count in enumerate(more.counts):
                found.counts[place] += count * times
            found.sum += more.sum * times

    def page(self, engine: str, model: str) -> dict[str, float]:
        """Return the values that a page must have, by the text before each value."""
        shown: dict[str, float] = {}
        for (name, labels), amount in self.counters.items():
            shown[_key(name, engine, model, labels)] = amount
        for (name, labels), found in self.histograms.items():
            total = 0
            for bound, count in zip((*found.bounds, None), found.counts, strict=True):
                total += count
                le = "+Inf" if bound is None else repr(bound)
                key = _key(f"{name}_bucket", engine, model, labels)
                shown[f'{key[:-1]},le="{le}"}}'] = total
            shown[_key(f"{name}_count", engine, model, labels)] = total
            shown[_key(f"{name}_sum", engine, model, labels)] = found.sum
        return shown

    def _histogram(self, series: Series, family: str) -> _Buckets:
        found = self.histograms.get(series)
        if found is None:
            found = self.histograms[series] = _Buckets(family)
        return found


class _Buckets:
    def __init__(self, family: str) -> None:
        self.family = family
        self.bounds = BOUNDS[family]
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0


def _key(name: str, engine: str, model: str, labels: Labels) -> str:
    named = sorted((*labels, ("engine", engine), ("model_name", model)))
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in named) + "}"
