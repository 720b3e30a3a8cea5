"""What a process's end, and a fork of it, mean for the publishers in it."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from multiprocessing import util as multiprocessing_util
from typing import Protocol


class Process(Protocol):
    """What belongs to one process."""

    def close(self) -> None:
        """The process ends."""

    def after_fork(self) -> None:
        """This process is a forked child: threads and sockets are the parent's."""


_known: weakref.WeakSet[Process] = weakref.WeakSet()
_inherited: list[object] = []


def enter(made: Process) -> None:
    """Tell ``made`` of forks, and of the end of this process."""
    _known.add(made)
    atexit.register(_weakly(made))


def started(made: Process) -> None:
    """Tell ``made`` of the end of a child of multiprocessing, if this is one.

    It leaves by os._exit, past atexit, but runs the finalizers that were made in it.
    """
    multiprocessing_util.Finalize(made, _weakly(made), exitpriority=10)


def leave_alone(*parents: object) -> None:
    """Keep a parent's sockets referenced: closing them would disturb the parent."""
    _inherited.append(parents)


def _weakly(made: Process) -> Callable[[], None]:
    """Closes ``made`` if it still exists."""
    reference = weakref.ref(made)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    return close


def _after_fork() -> None:
    for made in list(_known):
        made.after_fork()


os.register_at_fork(after_in_child=_after_fork)
