"""Room for lives: how many may be held, and what is done until one more fits.

Nothing here takes time for all lives at once. Where the sample halves, or a cache is emptied,
lives that are to go are counted and held until each one's turn comes: ``SLICE`` of
them after every call, and as many as it takes where a life needs the place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import zip_longest

from sidestep.tracking.kv_blocks.sampling import Sample

SLICE = 512
"""Lives looked at after a call: a millisecond, where their ages are told."""

Turns = Iterator[None]
"""Each step looks at one life, which may leave."""


class Room:
    """Places for lives of all kinds, never more than ``capacity``.

    Where fewer are wanted than are held, the capacity falls with them, a slice after every
    call: to let all go before the next life begins would take too long.

    Args:
        samples: Of which each kind follows its part; they halve together.

    Attributes:
        tracked: Lives held, those included that are to go and whose turn has not come.
        halvings: Times that the samples were halved.
        sweepers: Begin the turns of all lives of a kind: those outside of its sample go. The
            youngest come first, since the eldest can have lived through a lower bound.
        wanted: What ``capacity`` is to be.
        sweeping: The turns of all lives that may be outside, one of each kind at a time; while
            this is ``None`` none are.
    """

    __slots__ = (
        "_leaving",
        "_samples",
        "capacity",
        "halvings",
        "sweepers",
        "sweeping",
        "tracked",
        "wanted",
    )

    def __init__(self, capacity: int, *samples: Sample) -> None:
        self.capacity = self.wanted = capacity
        self.tracked = 0
        self.halvings = 0
        self.sweepers: list[Callable[[], Turns]] = []
        self.sweeping: Iterator[object] | None = None
        self._samples = samples
        self._leaving: deque[Turns] = deque()

    @property
    def waiting(self) -> bool:
        """Whether there are lives whose turn has not come."""
        return bool(self._leaving) or self.sweeping is not None or self.capacity > self.wanted

    def leave(self, turns: Turns) -> None:
        """Let go lives that are to be found no more."""
        self._leaving.append(turns)

    def sweep(self) -> None:
        """Let go lives outside of the samples."""
        # As far as another sweep has come, it knew a higher bound.
        # In step: where only one kind has lives outside, they are not behind all of the other.
        self.sweeping = zip_longest(*(begin() for begin in self.sweepers))

    def resize(self, wanted: int) -> None:
        """Have that many places, once no more are held."""
        self.wanted = wanted
        self.capacity = max(wanted, self.tracked)

    def advance(self) -> None:
        """Look at some of the lives that are to go."""
        if self.waiting:
            for _ in range(SLICE):
                if not self._turn():
                    break
        if self.capacity > self.wanted:
            self.capacity = max(self.wanted, self.tracked)
            if self.capacity > self.wanted and not self._leaving and self.sweeping is None:
                self._halve()

    def make(self) -> None:
        """Come nearer to a free place: one turn, or where nobody is to go half of the samples."""
        if not self._turn():
            self._halve()

    def _halve(self) -> None:
        self.halvings += 1
        lowered = [sample.limit(sample.bound >> 1) for sample in self._samples]
        if any(lowered):
            self.sweep()

    def _turn(self) -> bool:
        """Look at one life, or one of each kind; whether there was any."""
        while self._leaving:
            for _ in self._leaving[0]:
                return True
            self._leaving.popleft()
        for _ in self.sweeping or ():
            return True
        self.sweeping = None
        return False
