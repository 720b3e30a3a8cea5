"""Memory, file descriptors and runtime settings of this process."""

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
LARGE = 256 << 10
"""Bytes of a block that is returned to the operating system when it is freed."""
_MMAP_THRESHOLD = -3
"""glibc's ``M_MMAP_THRESHOLD``."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Return the resident memory in bytes; 0 where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def lowest_free_descriptor() -> int:
    """Return the descriptor that the next open file gets, or the limit if none can be opened.

    It is the number of open files as long as peers only open connections. A call costs 2 us.
    """
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return open_files_limit()
    os.close(descriptor)
    return descriptor


def open_files_limit() -> int:
    """Return the maximum number of file descriptors of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def trim() -> None:
    """Return the allocator's free pages to the operating system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def seed_library() -> None:
    """Seed the C library's random numbers unpredictably.

    A ROUTER numbers its peers from a random number, which is 1804289383 without a seed. libzmq 4.3.5
    aborts the process when a peer has chosen the next number as its routing id.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).srand(secrets.randbits(32))


def return_large_blocks() -> None:
    """Let the C library return each large block to the operating system as soon as it is freed.

    glibc would raise the size from which it does so to that of the largest block freed so far, and keep
    what the body of a page has taken. Call it before there are other threads.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, LARGE)


def calm_collector() -> None:
    """Collect garbage less often, and exclude all objects that exist now.

    A full collection holds the event loop for 10 to 50 ms, and reference counts free nearly all
    objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


def raise_open_files() -> int:
    """Raise the limit of open files to the hard limit, and return it.

    Each connection needs a descriptor. Without a free one, a listening socket that stays readable
    keeps a core busy.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft
