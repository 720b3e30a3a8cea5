"""Tables of checks: each row is a code, what to look for, and the text of a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sidestep.diagnosis.finding import Code, Finding

Checked = TypeVar("Checked")


@dataclass(frozen=True)
class Check(Generic[Checked]):
    """One row.

    Attributes:
        look: Returns what is wrong: a value, or several values as a list or an iterator, with a
            finding for each. An empty value or list means that nothing is wrong.
        text: The finding's text, in which ``{}`` is the value.
    """

    code: Code
    look: Callable[[Checked], object]
    text: str = "{}"


def run(checks: Iterable[Check[Checked]], checked: Checked, subject: str) -> Iterator[Finding]:
    """Yield the findings of all rows."""
    for each in checks:
        found = each.look(checked)
        for value in found if isinstance(found, list | Iterator) else [found] * bool(found):
            yield each.code.on(subject, each.text.format(value))


def codes(*tables: Iterable[Check[Any]]) -> list[Code]:
    """Return the codes of all rows."""
    return [each.code for table in tables for each in table]
