"""The series that there are, of pages or of a Prometheus: names, and the values of each label."""

from __future__ import annotations

import dataclasses

from prometheus_client.parser import text_string_to_metric_families

from sidestep.doctor.queries.promql import Selector

PROMETHEUS = ("up", "scrape_", "ALERTS")
"""Beginnings of names that every Prometheus has."""


@dataclasses.dataclass
class Inventory:
    """Series.

    Attributes:
        names: Values by label, by name of a sample.
        kinds: Kinds by name of a sample.
    """

    names: dict[str, dict[str, set[str]]] = dataclasses.field(default_factory=dict)
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)

    def add_page(self, text: str) -> None:
        """Add the samples of a page in Prometheus's text format.

        Raises:
            ValueError: It is no such page.
        """
        try:
            families = list(text_string_to_metric_families(text))
        except ValueError:
            raise ValueError("it is no metrics page") from None
        for family in families:
            for sample in family.samples:
                self.kinds[sample.name] = family.type
                labels = self.names.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    labels.setdefault(label, set()).add(value)

    def matching(self, selector: Selector) -> list[str]:
        """Return the names that the selector's conditions on the name accept."""
        named = [each for each in selector.matchers if each.label == "__name__"]
        return [name for name in self.names if all(each.accepts(name) for each in named)]

    def labels_of(self, prefix: str) -> set[str]:
        """Return all labels of names with this beginning."""
        found = (labels for name, labels in self.names.items() if name.startswith(prefix))
        return {label for labels in found for label in labels}
