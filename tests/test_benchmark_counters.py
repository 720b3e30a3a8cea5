"""Counters of the benchmarks, against what this process does."""

from __future__ import annotations

import threading
import time

import pytest
from benchmarks.counters import open_counter, read_counter, since, spent

TASK_CLOCK = 1, 1
"""Type and number of an event that every Linux has: nanoseconds of CPU."""


def burn(seconds: float) -> None:
    """Use the CPU of this thread for ``seconds``."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_other_threads_are_counted_and_the_own_one_is_not() -> None:
    """CPU time and voluntary switches are those of all threads but the measuring one."""
    started = spent()
    burn(0.2)
    alone = since(started)

    def work() -> None:
        burn(0.1)
        for _ in range(20):
            time.sleep(0.001)

    started = spent()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    together = since(started)

    assert alone.cpu < 0.1e9 < together.cpu
    assert together.switches >= 20


def test_a_counter_includes_threads_that_start_later() -> None:
    """One descriptor counts for the thread that opened it and for the threads that it starts."""
    counter = open_counter(*TASK_CLOCK)
    if counter is None:
        pytest.skip("this system counts no events")
    thread = threading.Thread(target=burn, args=(0.1,))
    thread.start()
    thread.join()

    assert read_counter(counter) >= 0.1e9


def test_an_unknown_event_is_not_counted() -> None:
    """A machine without the event is recognized when the counter is opened."""
    assert open_counter(1, 1 << 40) is None
