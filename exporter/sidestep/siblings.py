"""Parallel samples of one question: how many they were, and how long the longest became."""

from __future__ import annotations

TOGETHER = 0.5
"""Seconds in which all samples of one question have reached the queue."""


class Group:
    """The samples of one question. Their number is known once no more can come."""

    __slots__ = ("aborted", "closed", "live", "longest", "number", "queued", "samples")

    def __init__(self, number: int, queued: float) -> None:
        self.number = number
        self.queued = queued
        self.live = self.samples = self.longest = 0
        self.aborted = self.closed = False


class Siblings:
    """All groups of which a sample is in flight, or might still come.

    Attributes:
        observed: Number of samples and tokens of the longest, of every group that
            ended since this was last emptied; none of one whose samples were aborted.
    """

    def __init__(self) -> None:
        self.observed: list[tuple[int, int]] = []
        self._groups: dict[int, Group] = {}
        self._open: dict[int, Group] = {}

    def join(self, number: int, sample: int, queued: float) -> Group | None:
        """The group of a sample that was queued; None where its first was not heard of."""
        group = self._groups.get(number)
        if group is None:
            if sample:
                return None
            group = self._groups[number] = Group(number, queued)
        self._open.pop(number, None)
        group.live += 1
        group.samples += 1
        return group

    def leave(self, group: Group, tokens: int, *, aborted: bool, outputs: bool) -> None:
        """A sample ended after ``tokens``; ``outputs``: it had more than one output."""
        group.live -= 1
        group.aborted = group.aborted or aborted
        group.longest = max(group.longest, tokens)
        # Samples are queued together: once one had a second output, all are there.
        group.closed = group.closed or outputs
        if group.live:
            return
        if group.closed or group.aborted:
            self._end(group)
        else:
            self._open[group.number] = group

    def pass_time(self, now: float) -> None:
        """End the groups that nobody joins any more."""
        for group in list(self._open.values()) if self._open else ():
            if now >= group.queued + TOGETHER:
                self._end(group)

    def clear(self) -> None:
        """Forget all groups."""
        self._groups.clear()
        self._open.clear()

    def _end(self, group: Group) -> None:
        del self._groups[group.number]
        self._open.pop(group.number, None)
        if not group.aborted:
            self.observed.append((group.samples, group.longest))
