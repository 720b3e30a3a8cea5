"""Passthrough pages without a socket: scraped text in, exposed text out."""

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
from sidestep.exposition.text_page import write_passed_on

Samples = dict[tuple[str, frozenset[tuple[str, str]], object], str]


class Passing:
    """Scraped pages, and the names that the exporter keeps for itself."""

    def __init__(
        self, *labels: Labels, ours: Collection[str] = (), excluded: Collection[str] = ()
    ) -> None:
        self.ours = frozenset(ours)
        self.passed = PassthroughRegistry(lambda: [self.ours])
        self.pages = [self.passed.page(given, excluded) for given in labels or ((),)]

    def take(self, text: str | bytes, at: int = 0, size: int = 1 << 16) -> None:
        """Parse a page in chunks of ``size``."""
        data = text.encode() if isinstance(text, str) else text
        chunks = [data[start : start + size] for start in range(0, len(data), size)]
        self.pages[at].update(chunks)

    def show(self, *names: str, openmetrics: bool = False) -> str:
        """Return the exposed text."""
        return b"".join(
            write_passed_on(self.passed.families(names), openmetrics=openmetrics)
        ).decode()

    def left_out(self, at: int = 0) -> Counter[str]:
        """Return what was left out of a page, by reason."""
        return self.passed.left_out(self.page(at))

    def page(self, at: int = 0) -> Page:
        """Return one of the pages."""
        return self.pages[at]


def shown(text: str) -> str:
    """Return the exposed text of a scraped page."""
    passing = Passing()
    passing.take(text)
    return passing.show()


def samples(text: str) -> Samples:
    """Return the samples that prometheus_client reads from a page."""
    return _samples(text_string_to_metric_families(text))


def openmetrics_samples(text: str) -> Samples:
    """Return the samples that its OpenMetrics parser reads from a page without ``# EOF``."""
    return _samples(openmetrics_families(text + "# EOF\n"))  # type: ignore[no-untyped-call]


def _samples(families: Iterable[Metric]) -> Samples:
    """Return values as text, so that NaN equals itself, by name, labels and timestamp.

    The parser appends ``_total`` to the name of every counter.
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
