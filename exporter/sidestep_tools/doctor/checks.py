"""Tables of checks: each row is a code, what to look for, and how a finding words it."""

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
        look: Returns what is wrong: a value, or a list with one for each finding; nothing if it is empty.
        text: The finding's text, in which ``{}`` is the value.
    """

    code: Code
    look: Callable[[Checked], object]
    text: str = "{}"


def run(checks: Iterable[Check[Checked]], checked: Checked, subject: str) -> Iterator[Finding]:
    """Yield the findings of all rows."""
    for each in checks:
        found = each.look(checked)
        for value in found if isinstance(found, list) else [found] * bool(found):
            yield each.code.on(subject, each.text.format(value))


def codes(*tables: Iterable[Check[Any]]) -> list[Code]:
    """Return the codes of all rows."""
    return [each.code for table in tables for each in table]
