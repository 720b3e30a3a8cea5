"""Methods of objects that a process calls when it exits or forks, while the objects exist."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def call_after_fork(method: Callable[[], None]) -> None:
    """Call ``method`` in forked children."""
    os.register_at_fork(after_in_child=weak(method))


def weak(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a bound method if its object still exists."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call
