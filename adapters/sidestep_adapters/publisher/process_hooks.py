"""Hooks that call an object's method when its process exits or forks, while the object exists."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from multiprocessing import util as multiprocessing_util

_inherited: list[object] = []


def call_after_fork(method: Callable[[], None]) -> None:
    """Call ``method`` in forked children."""
    os.register_at_fork(after_in_child=_weak(method))


def call_at_exit(method: Callable[[], None]) -> None:
    """Call ``method`` when this process exits."""
    atexit.register(_weak(method))


def call_at_child_exit(owner: object, method: Callable[[], None]) -> None:
    """Call ``method`` of ``owner`` when this process exits, which is a child of multiprocessing.

    Such a child leaves through ``os._exit``, which skips atexit but runs the finalizers that were
    registered in the child.
    """
    multiprocessing_util.Finalize(owner, _weak(method), exitpriority=10)


def keep_referenced(*parents: object) -> None:
    """Keep references to a parent's sockets: closing them in a child would disturb the parent."""
    _inherited.append(parents)


def _weak(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a bound method if its object still exists."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call
