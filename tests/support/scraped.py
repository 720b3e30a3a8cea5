"""Passthrough pages without a socket: input and exposed output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from sidestep.exposition.passthrough.page import Page
from sidestep.exposition.passthrough.parser import Labels
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.exposition.passthrough_text import pieces

Samples = dict[tuple[str, frozenset[tuple[str, str]], object], str]


class Passing:
    """Some pages and the names that are the exporter's own."""

    def __init__(
        self, *labels: Labels, ours: Collection[str] = (), excluded: Collection[str] = ()
    ) -> None:
        self.ours = frozenset(ours)
        self.passed = PassthroughRegistry(lambda: [self.ours])
        self.pages = [self.passed.page(given, excluded) for given in labels or ((),)]

    def take(self, text: str | bytes, at: int = 0, size: int = 1 << 16) -> int:
        """Feed a page in chunks of ``size``; in how many slices it was read."""
        data = text.encode() if isinstance(text, str) else text
        chunks = [data[start : start + size] for start in range(0, len(data), size)]
        return sum(1 for _ in self.pages[at].update(chunks))

    def show(self, *names: str, openmetrics: bool = False) -> str:
        """What is shown."""
        found = pieces(self.passed, openmetrics=openmetrics, names=names)
        return b"".join(line for some in found for line in some).decode()

    def left_out(self, at: int = 0) -> Counter[str]:
        """What is not, of one page."""
        return self.passed.left_out(self.page(at))

    def page(self, at: int = 0) -> Page:
        """One of them."""
        return self.pages[at]


def shown(text: str) -> str:
    """What becomes of a page."""
    passing = Passing()
    passing.take(text)
    return passing.show()


def samples(text: str) -> Samples:
    """What prometheus_client reads on a page."""
    return _samples(text_string_to_metric_families(text))


def openmetrics_samples(text: str) -> Samples:
    """Likewise, strictly, without the end that it has to have."""
    return _samples(openmetrics_families(text + "# EOF\n"))  # type: ignore[no-untyped-call]


def _samples(families: Iterable[Metric]) -> Samples:
    """By name, labels that are not empty and time, as text: so NaN is itself.

    The reader calls every counter ``_total``, also one that is not.
    """
    return {
        (
            one.name.removesuffix("_total"),
            frozenset((name, value) for name, value in one.labels.items() if value),
            one.timestamp and float(one.timestamp),
        ): str(float(one.value))
        for family in families
        for one in family.samples
    }
