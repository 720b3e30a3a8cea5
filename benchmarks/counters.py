"""Resources that a process uses besides the measured thread, and its instructions if the machine counts them."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import time
from typing import NamedTuple

_ATTRIBUTES = struct.Struct("=IIQQQQQIIQ")
"""The first version of ``struct perf_event_attr``, see perf_event_open(2)."""
_FLAGS = 1 << 1 | 1 << 5 | 1 << 6
"""Threads that start later are counted, too; the kernel and the hypervisor are not."""
_SYSTEM_CALL = {"x86_64": 298, "aarch64": 241}
INSTRUCTIONS = 0, 1
"""Type and number of the event; most virtual machines do not count it."""


class Spent(NamedTuple):
    """CPU nanoseconds and voluntary context switches of all threads except the calling one.

    Attributes:
        instructions: Instructions of all threads in user space; 0 if the machine does not count them.
    """

    cpu: float
    switches: float
    instructions: float


def open_counter(kind: int, event: int) -> int | None:
    """Return a descriptor that counts an event of this thread and of the threads it starts later.

    None where the system does not count it.
    """
    number = _SYSTEM_CALL.get(platform.machine())
    if number is None:
        return None
    attributes = _ATTRIBUTES.pack(kind, _ATTRIBUTES.size, event, 0, 0, 0, _FLAGS, 0, 0, 0)
    descriptor: int = ctypes.CDLL(None).syscall(number, attributes, 0, -1, -1, 0)
    return None if descriptor < 0 else descriptor


def read_counter(descriptor: int) -> int:
    """Return the count so far."""
    return int.from_bytes(os.read(descriptor, 8), "little")


# Opened before any thread that is to be counted.
_instructions = open_counter(*INSTRUCTIONS)


def spent() -> Spent:
    """Return what this process has used so far."""
    everything = resource.getrusage(resource.RUSAGE_SELF)
    own = resource.getrusage(resource.RUSAGE_THREAD)
    return Spent(
        time.process_time_ns() - time.thread_time_ns(),
        everything.ru_nvcsw - own.ru_nvcsw,
        0 if _instructions is None else read_counter(_instructions),
    )


def since(started: Spent) -> Spent:
    """Return what this process has used since ``started``."""
    return Spent(*(now - before for now, before in zip(spent(), started, strict=True)))
