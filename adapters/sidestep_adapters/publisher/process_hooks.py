"""Methods of objects that a process calls when it exits or forks, while the objects exist."""

from __future__ import annotations

import weakref
from collections.abc import Callable


def weak(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a bound method if its object still exists."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call
