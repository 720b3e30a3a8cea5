"""What the operating system knows of this process, and may give it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import secrets
from collections.abc import Mapping
from pathlib import Path

COLLECT_AFTER = 20_000
"""Objects more, from which on cycles are looked for; Python's own number is 700."""
GROWN = 2.0
"""Times as many objects, from which on a full collection looks through those kept for good, too."""
FULL = 2
"""The oldest generation."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes of memory in use; 0 where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def lowest_free_descriptor() -> int:
    """Return the number that the next open file gets, or the limit where none can be opened.

    While peers only open connections, this is how many are open; a look costs 2 microseconds.
    """
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return open_files_limit()
    os.close(descriptor)
    return descriptor


def open_files_limit() -> int:
    """Return how many file descriptors this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def trim() -> None:
    """Give the allocator's free pages back, which it would keep for the next time."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def seed_library() -> None:
    """Let the C library's random numbers begin where nobody knows.

    A ROUTER numbers its peers from one of them, which unseeded is 1804289383 in every
    process, and libzmq 4.3.5 aborts the process when a peer has chosen the number that is next.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).srand(secrets.randbits(32))


class _Frozen:
    """What has lived through two collections is not looked through by the later ones.

    Cycles in there would never be freed: where it has grown, a full collection is one of all.
    Python makes none by itself as long as this goes on, since to freeze is to begin to count anew.
    """

    def __init__(self) -> None:
        self._known = gc.get_freeze_count()
        self._thawed = False
        self._collections = 0
        """Since the last look at how much there is, which takes milliseconds."""

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """A collection starts, or stops: a callback of ``gc``."""
        generation = info["generation"]
        if phase == "start":
            if generation == FULL:
                self._look()
        elif generation == FULL:
            gc.freeze()
            if self._thawed:
                self._known, self._thawed = gc.get_freeze_count(), False
        elif generation and not self._thawed:
            self._collections += 1
            if self._collections >= gc.get_threshold()[FULL]:
                self._look()
            if not self._thawed:
                gc.freeze()

    def _look(self) -> None:
        """Thaw all where it has grown, until a full collection has been, for which it makes way."""
        self._collections = 0
        if gc.get_freeze_count() > GROWN * self._known:
            gc.unfreeze()
            self._thawed = True


def calm_collector() -> None:
    """Hold the event loop less for garbage: what is here now is here for good.

    Looking through all modules and series takes Python 10 to 50 ms. Nearly all that comes and goes
    is in no cycle, and freed without that.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    # Python 3.14 collects little by little and never in full by itself, for which it has no
    # threshold: what is kept for good there would never be looked through again.
    if gc.get_threshold()[FULL]:
        gc.callbacks.append(_Frozen())


def raise_open_files() -> int:
    """Take as many file descriptors as the system lets us have; how many those are.

    Every engine and every stranger who connects costs one; where they run out, a
    listening socket that is readable and cannot be accepted from takes a whole core.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft
