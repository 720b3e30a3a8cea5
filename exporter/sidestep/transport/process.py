"""What the operating system knows of this process, and may give it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import secrets
from pathlib import Path

COLLECT_AFTER = 20_000
"""Objects allocated before the garbage collector runs; Python's default is 700."""
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


def calm_collector() -> None:
    """Collect garbage less often, and never look through what exists at start again.

    A full collection over all modules holds the event loop for 10 to 50 ms, and nearly all
    objects that come and go are in no cycle: reference counts free them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


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
