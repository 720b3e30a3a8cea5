"""What a server still counts on its own page when its statistics cannot be had any more. No I/O.

After SIGTERM Triton's statistics are closed at once, while its page answers until the requests
in flight are done. The page goes on over reloads, which make statistics begin anew, so it has
more by an offset. Statistics were there before the page was asked for, so each comparison shows
the offset, or more; the least of them is kept. What the last page has beyond that is work that
nobody has counted yet, and all of it if the version once rested. One process must have ended for
that: if it only could not be reached and had begun anew unseen, its statistics are less than was
told when they are back, and are taken for those of another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from sidestep.engines.triton.statistics import BegunAnewError, difference
from sidestep.engines.triton.wire import ModelStats
from sidestep.exposition.passthrough.page import Plan
from sidestep_adapters.triton.counters import UNKNOWN, Numbers, Places, numbers, raised
from sidestep_adapters.triton.statistics import Head

PERIOD = 10.0
"""Seconds after which a version is compared again, if no better occasion comes before."""
SETTLED = 0.005
"""Seconds before a page that statistics must be there: Triton counts for them first and for the
page a moment later."""
STEP = 40
"""Versions that are compared between two turns of the loop."""


class _Life:
    """One version, from when its statistics began.

    Attributes:
        offsets: What the page has more, at most.
        page: What it had when it was last compared.
        compared: When that was.
        gap: Seconds between statistics and page in the best comparison.
    """

    __slots__ = ("compared", "gap", "offsets", "page")

    def __init__(self) -> None:
        self.offsets = self.page = UNKNOWN
        self.compared = float("-inf")
        self.gap = float("inf")

    def compare(self, page: Numbers, stats: ModelStats) -> None:
        """Learn from a page that was asked for after ``stats``."""
        if any(map(_is_gone, page, self.page)):
            self.offsets = UNKNOWN
        self.page = page
        self.offsets = tuple(map(_least, self.offsets, map(_less, page, numbers(stats))))

    def last(self, stats: ModelStats) -> ModelStats:
        """``stats`` with what the page has beyond them."""
        return raised(stats, tuple(map(_less, self.page, self.offsets)))


class _Version(NamedTuple):
    life: _Life
    stats: ModelStats


class Drain:
    """Of one server; reads its page, as a ``passed.Reader``.

    Args:
        tell: Takes the last statistics of versions that have counted more before the server
            ended, all at once.
    """

    def __init__(self, tell: Callable[[Mapping[Head, ModelStats]], None]) -> None:
        self._tell = tell
        self._places = Places()
        self._versions: dict[Head, _Version] = {}
        self._asked: dict[Head, _Version] = {}
        """As they were when the page was asked for."""
        self._asked_at = self._heard_at = float("-inf")
        self._gap = float("inf")
        """Seconds from statistics to the page."""
        self._is_closed = False
        """Whether statistics cannot be had."""
        self._is_last = False
        """Whether the page was asked for since."""
        self._is_over = False
        """Whether pages do not count until there are statistics again."""
        self._left: dict[Head, ModelStats] = {}
        """What is to be told if the page does not answer any more either."""

    def looked(self, head: Head, stats: ModelStats) -> None:
        """A version's statistics are these; each must be told that an exporter was."""
        known = self._versions.get(head)
        life = _Life() if known is None or _has_begun_anew(stats, known.stats) else known.life
        self._versions[head] = _Version(life, stats)

    def left(self, head: Head) -> None:
        """A version is not there any more, or another from now on."""
        self._versions.pop(head, None)

    def heard(self, now: float) -> None:
        """There are statistics; looks at them follow."""
        self._heard_at = now
        self._is_closed = self._is_last = self._is_over = False
        self._left = {}

    def closed(self) -> None:
        """Whoever asked for statistics was refused a connection."""
        self._is_closed = True

    def forget(self) -> None:
        """Let go of everything."""
        self._versions, self._asked, self._left = {}, {}, {}
        self._places = Places()

    def asked(self, now: float) -> None:
        """See ``Reader``."""
        self._asked_at, self._gap = now, now - self._heard_at
        self._is_last = self._is_closed
        is_wanted = self._gap >= SETTLED and not self._is_over
        self._asked = self._versions.copy() if is_wanted else {}

    def read(self, plan: Plan) -> Iterator[None]:
        """See ``Reader``."""
        asked, self._asked = self._asked, {}
        if not asked:
            return
        values = plan.values
        yield from self._places.find(plan)
        left: dict[Head, ModelStats] = {}
        compared = 0
        for head, (life, stats) in asked.items():
            current = self._versions.get(head)
            if current is None or current.life is not life:
                continue
            if not self._is_last and not self._is_due(life):
                continue
            compared += 1
            if compared % STEP == 0:
                yield
            page = self._places.numbers(head, values)
            if self._is_last:
                # At its end a server unloads its models before its page is closed.
                page = tuple(map(_latest, page, life.page))
                if any(map(_is_gone, page, life.page)):
                    # Another process answers; what this one had at last nobody knows.
                    self._end()
                    return
            life.compare(page, stats)
            life.compared, life.gap = self._asked_at, min(life.gap, self._gap)
            last = life.last(stats) if self._is_last else stats
            if last != stats:
                left[head] = last
        if self._is_last:
            self._left = left

    def failed(self, cause: str) -> None:
        """See ``Reader``."""
        self._asked = {}
        self._places = Places()
        if cause == "unreachable" and self._is_closed:
            left = self._left
            self._end()
            if left:
                self._tell(left)

    def _is_due(self, life: _Life) -> bool:
        return self._asked_at - life.compared >= PERIOD or self._gap <= life.gap / 2

    def _end(self) -> None:
        """The process is not there any more: the next one begins at 0."""
        self._is_over = True
        self._left = {}
        self._versions = {
            head: _Version(_Life(), version.stats) for head, version in self._versions.items()
        }


def _has_begun_anew(new: ModelStats, old: ModelStats) -> bool:
    """As an exporter decides it."""
    try:
        difference(new, old)
    except BegunAnewError:
        return True
    return False


def _is_gone(new: int | None, old: int | None) -> bool:
    """Whether a number is lower, or not there any more."""
    return old is not None and (new is None or new < old)


def _latest(new: int | None, old: int | None) -> int | None:
    return old if new is None else new


def _less(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one - other


def _least(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
