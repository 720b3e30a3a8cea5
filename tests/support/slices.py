"""Work per slice of the event loop, in function calls: the same on any machine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

from sidestep.exposition.aggregate import Steps

Result = TypeVar("Result")

MOST = 8000
"""Calls that fit well into a millisecond: some 0.1 us each."""


class Calls:
    """Calls of functions, ours and the interpreter's, since it was made."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, _frame: object, event: str, _argument: object) -> None:
        """For ``sys.setprofile``."""
        self.count += event in ("call", "c_call")


@contextlib.contextmanager
def counted() -> Iterator[Calls]:
    """Counts calls while the block lasts."""
    calls, before = Calls(), sys.getprofile()
    sys.setprofile(calls.note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def slices(items: Iterator[Any]) -> list[int]:
    """The calls that each step of ``items`` takes, the last one, which finds the end, included."""
    found: list[int] = []
    end = object()
    step: Any = None
    while step is not end:
        with counted() as calls:
            step = next(items, end)
        found.append(calls.count)
    return found


def made(making: Steps[Result]) -> Result:
    """Return the result of work that runs in steps."""
    while True:
        try:
            next(making)
        except StopIteration as done:
            found: Result = done.value
            return found
