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

    def after_fork(self) -> None:
        """Drop what a forked child, which is this process, inherited from its parent."""


class Closable(Protocol):
    """An object that is released when its process exits."""

    def close(self) -> None:
        """Release the object."""


_fork_aware: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_inherited: list[object] = []


def call_after_fork(owner: ForkAware) -> None:
    """Call ``owner.after_fork`` in forked children while ``owner`` exists."""
    _fork_aware.add(owner)


def close_at_exit(owner: Closable) -> None:
    """Close ``owner`` when this process exits."""
    atexit.register(_closer(owner))


def close_at_child_exit(owner: Closable) -> None:
    """Close ``owner`` when a child of multiprocessing exits.

    Such a child leaves through ``os._exit``, which skips atexit but runs the finalizers that were
    registered in the child.
    """
    multiprocessing_util.Finalize(owner, _closer(owner), exitpriority=10)


def keep_referenced(*parents: object) -> None:
    """Keep references to a parent's sockets: closing them in a child would disturb the parent."""
    _inherited.append(parents)


def _closer(owner: Closable) -> Callable[[], None]:
    """Return a function that closes ``owner`` if it still exists."""
    reference = weakref.ref(owner)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    return close


def _after_fork() -> None:
    for owner in list(_fork_aware):
        owner.after_fork()


os.register_at_fork(after_in_child=_after_fork)
