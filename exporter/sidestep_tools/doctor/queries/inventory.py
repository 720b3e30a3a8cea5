"""The series that there are, of pages or of a Prometheus: names, and the values of each label."""

from __future__ import annotations

import dataclasses
import re

from prometheus_client.parser import text_string_to_metric_families

from sidestep_tools.doctor.queries.promql import Selector

_NAME = re.compile(r"^[a-zA-Z_:][\w:]*", re.MULTILINE)


@dataclasses.dataclass
class Inventory:
    """Series.

    Attributes:
        names: Values by label, by name of a sample.
        kinds: Kinds by name of a family.
    """

    names: dict[str, dict[str, set[str]]] = dataclasses.field(default_factory=dict)
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)

    def add_page(self, text: str) -> None:
        """Add the samples of a page in Prometheus's text format.

        Raises:
            ValueError: It is no such page.
        """
        written = set(_NAME.findall(text))
        for metric in text_string_to_metric_families(text):
            self.kinds[metric.name] = metric.type
            for sample in metric.samples:
                # The parser gives every counter the suffix _total.
                name = sample.name if sample.name in written else metric.name
                labels = self.names.setdefault(name, {})
                for label, value in sample.labels.items():
                    labels.setdefault(label, set()).add(value)

    def matching(self, selector: Selector) -> list[str]:
        """Return the names that the selector's conditions on the name accept."""
        named = [each for each in selector.matchers if each.label == "__name__"]
        return [name for name in self.names if all(each.accepts(name) for each in named)]
