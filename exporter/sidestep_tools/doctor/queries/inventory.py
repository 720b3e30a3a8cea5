"""The series that there are, of pages or of a Prometheus: names, and the values of each label."""

from __future__ import annotations

import dataclasses

from sidestep.errors import WireError
from sidestep.exposition.passthrough.parser import parse_comment, parse_head, unescape_labels
from sidestep_tools.doctor.queries.promql import Selector


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
        for number, line in enumerate(text.split("\n"), 1):
            try:
                if line.startswith("#"):
                    comment = parse_comment(line.encode())
                    if comment is not None and comment.is_type:
                        self.kinds[comment.name] = comment.text
                elif line.strip():
                    head = parse_head(line.encode())
                    labels = self.names.setdefault(head.name, {})
                    for label, value in unescape_labels(head.labels).items():
                        labels.setdefault(label, set()).add(value)
            except WireError as error:
                if error.reason != "unknown_kind":  # OpenMetrics has more of them
                    raise ValueError(f"line {number} is none of a metrics page") from None

    def matching(self, selector: Selector) -> list[str]:
        """Return the names that the selector's conditions on the name accept."""
        named = [each for each in selector.matchers if each.label == "__name__"]
        return [name for name in self.names if all(each.accepts(name) for each in named)]
