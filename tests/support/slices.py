"""Work between two yields to the event loop, counted in function calls: equal on all machines."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

from sidestep.exposition.aggregate import Steps

Result = TypeVar("Result")

MOST = 8000
"""Calls that fit into a millisecond, at about 0.1 us each."""


class Calls:
    """A counter of function calls, Python's and C's."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, _frame: object, event: str, _argument: object) -> None:
        """Count an event of ``sys.setprofile``."""
        self.count += event in ("call", "c_call")


@contextlib.contextmanager
def counted() -> Iterator[Calls]:
    """Count calls within the block."""
    calls, before = Calls(), sys.getprofile()
    sys.setprofile(calls.note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def slices(items: Iterator[Any]) -> list[int]:
    """Return the calls of each step of ``items``, including the step that ends it."""
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
