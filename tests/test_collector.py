"""What Python's collector looks through: each in a process of its own, whose collector it is."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import gc, weakref
from sidestep.transport.process import calm_collector

class Node:
    def __init__(self):
        self.itself = self

gc.disable()
"""


def said(script: str, before: str = "gc.set_threshold(700, 10, 10)\n") -> list[str]:
    """The lines that the script prints, which begins after ``before`` with the collector calmed."""
    command = [sys.executable, "-c", f"{BEGIN}{before}calm_collector()\n{script}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("generation", [1, 2])
def test_a_collection_is_not_over_what_the_last_one_found(generation: int) -> None:
    """Many engines' series are looked through once, and not every ten seconds."""
    before, after = said(
        "kept = [Node() for _ in range(1000)]\n"
        "print(len(gc.get_objects()))\n"
        f"gc.collect({generation})\n"
        "print(len(gc.get_objects()))\n"
    )

    assert int(before) > 1000
    assert int(after) < 100


def test_cycles_among_what_was_kept_are_freed_at_last() -> None:
    """As soon as there is twice as much: memory has a bound."""
    few, many = said(
        "known = gc.get_freeze_count()\n"
        "kept = [Node() for _ in range(known // 100)]\n"
        "seen = [weakref.ref(one) for one in kept]\n"
        "gc.collect()\n"
        "del kept\n"
        "gc.collect()\n"
        "print(sum(one() is not None for one in seen) == len(seen))\n"
        "more = [Node() for _ in range(2 * known)]\n"
        "gc.collect()\n"
        "gc.collect()\n"
        "print(any(one() is not None for one in seen))\n"
    )

    assert few == "True"
    assert many == "False"


def test_a_full_collection_comes_by_itself() -> None:
    """As soon as there is twice as much, whoever never asks for one."""
    most, left = said(
        "from collections import deque\n"
        "gc.set_threshold(1000, 3, 3)\n"
        "known = gc.get_freeze_count()\n"
        "gc.enable()\n"
        "live = deque(maxlen=3000)\n"
        "most = 0\n"
        "for number in range(100 * known // 3):\n"
        "    live.append(Node())\n"
        "    if not number % 500:\n"
        "        most = max(most, gc.get_freeze_count())\n"
        "gc.unfreeze()\n"
        "print(most / known)\n"
        "print(sum(type(one) is Node for one in gc.get_objects()) / known)\n"
    )

    assert float(most) < 4
    assert float(left) < 4


def test_what_was_looked_through_as_a_whole_is_kept_for_good_again() -> None:
    """Growth is counted from then on: the next full collection is a short one."""
    found = said(
        "kept = [Node() for _ in range(3 * gc.get_freeze_count())]\n"
        "gc.collect()\n"
        "gc.collect()\n"
        "frozen = gc.get_freeze_count()\n"
        "gc.callbacks.append(lambda phase, _: print(gc.get_freeze_count() >= frozen))\n"
        "gc.collect()\n"
    )

    assert found == ["True", "True"]


def test_nothing_is_kept_for_good_where_no_full_collection_comes_by_itself() -> None:
    """As in Python 3.14, which has no threshold for it: cycles there would never be freed."""
    found = said(
        "kept = [Node() for _ in range(1000)]\n"
        "seen = [weakref.ref(one) for one in kept]\n"
        "gc.collect(1)\n"
        "del kept\n"
        "gc.collect()\n"
        "print(any(one() is not None for one in seen))\n",
        before="gc.set_threshold(700, 10, 0)\n",
    )

    assert found == ["False"]
