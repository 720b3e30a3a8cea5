"""Hooks that run when a process exits or forks."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from multiprocessing import util as multiprocessing_util
from typing import Protocol


class ForkAware(Protocol):
    """An object that belongs to one process."""

    def close(self) -> None:
        """Release the object; the process exits."""

    def after_fork(self) -> None:
        """Drop the threads and sockets inherited from the parent; this process is a forked child."""


_registered: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_inherited: list[object] = []


def register(owner: ForkAware) -> None:
    """Call ``owner.after_fork`` in forked children, and ``owner.close`` when this process exits."""
    _registered.add(owner)
    atexit.register(_closer(owner))


def close_at_child_exit(owner: ForkAware) -> None:
    """Close ``owner`` when a child of multiprocessing exits.

    Such a child leaves through ``os._exit``, which skips atexit but runs the finalizers that were
    registered in the child.
    """
    multiprocessing_util.Finalize(owner, _closer(owner), exitpriority=10)


def keep_referenced(*parents: object) -> None:
    """Keep references to a parent's sockets: closing them in a child would disturb the parent."""
    _inherited.append(parents)


def _closer(owner: ForkAware) -> Callable[[], None]:
    """Return a function that closes ``owner`` if it still exists."""
    reference = weakref.ref(owner)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    return close


def _after_fork() -> None:
    for owner in list(_registered):
        owner.after_fork()


os.register_at_fork(after_in_child=_after_fork)
