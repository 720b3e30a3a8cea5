"""Ways to hang that a test asks a process of an engine for.

Each lasts as long as a file of its name exists in the folder ``$WEDGES``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

HELD_SECONDS = 40
"""Seconds for which the GIL is held, unless a signal interrupts the C call that holds it."""


def is_set(wedge: str) -> bool:
    """Return whether the test has asked for this wedge."""
    return (Path(os.environ["WEDGES"]) / wedge).exists()


def sleep_while_set(wedge: str) -> None:
    """Sleep until the test releases this wedge."""
    while is_set(wedge):
        time.sleep(0.02)


def spin_while_set(wedge: str) -> None:
    """Compute until the test releases this wedge, and hand over the GIL only when asked to."""
    while is_set(wedge):
        sum(range(10_000))


def wait_for_lock(wedge: str) -> None:
    """Wait for a lock that another thread holds until the test releases this wedge."""
    lock, is_held = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            sleep_while_set(wedge)

    if is_set(wedge):
        threading.Thread(target=hold, daemon=True).start()
        is_held.wait()
        with lock:
            pass


def hold_gil(wedge: str) -> None:
    """Call a C function that sleeps and keeps the GIL."""
    if is_set(wedge):
        ctypes.PyDLL(None).sleep(HELD_SECONDS)


def make_interruptible() -> None:
    """Let SIGUSR1 interrupt a C call: its handler does nothing."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
