"""Parallel samples of one question: how many they were, and how long the longest became.

A router may give the samples of one question to several engines, whose events come
in any order. The question counts for the engine whose sample ended last, by the stamps.
"""

from __future__ import annotations

from collections.abc import Iterable

from sidestep.tracking.requests.capacity import RequestCapacity

GROUP_TIMEOUT = 5.0
"""Seconds after a sample's end in which its siblings have reached a queue, and we heard of it."""
MAX_WAITING_GROUPS = 4096


class SampleGroup:
    """The samples of one question, of whichever engine."""

    __slots__ = (
        "aborted", "closed", "deadline", "ended", "highest", "live", "longest", "number", "owner",
        "samples", "waits",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.deadline = 0.0
        self.ended = -1.0
        self.owner: EngineSamples | None = None
        self.live = self.samples = self.longest = 0
        self.highest = -1
        self.aborted = self.closed = False
        self.waits: EngineSamples | None = None
        """The engine at which it waits for samples that might still come."""


class SampleGroups:
    """What the engines of one exporter share.

    Attributes:
        groups: By number; each has a sample in flight, or might get one.
        places: For the requests of all of them.
    """

    def __init__(self) -> None:
        self.groups: dict[int, SampleGroup] = {}
        self.capacity = RequestCapacity()


class EngineSamples:
    """One engine's part in the questions.

    Attributes:
        observed: Number of samples and tokens of the longest, of every question that
            ended here since this was last emptied; none of which a sample was aborted.
    """

    def __init__(self, sample_groups: SampleGroups) -> None:
        self.observed: list[tuple[int, int]] = []
        self._sample_groups = sample_groups
        self._open: dict[int, SampleGroup] = {}
        self._closed = False

    def join(self, number: int, sample: int) -> None:
        """A sample of that question was queued here."""
        group = self._sample_groups.groups.get(number)
        if group is None:
            group = self._sample_groups.groups[number] = SampleGroup(number)
        if group.waits is not None:
            del group.waits._open[number]
            group.waits = None
        group.live += 1
        group.samples += 1
        group.highest = max(group.highest, sample)

    def wait_for_samples(self, group: SampleGroup) -> None:
        """Wait, until its deadline, for samples of ``group`` that might still come."""
        self._open[group.number] = group
        group.waits = self

    def leave(self, number: int, now: float, tokens: int, *, aborted: bool, outputs: bool) -> None:
        """A sample ended here after ``tokens``; ``outputs``: it had more than one output."""
        group = self._sample_groups.groups[number]
        group.live -= 1
        group.aborted = group.aborted or aborted
        group.longest = max(group.longest, tokens)
        if now > group.ended:
            group.ended, group.owner = now, self
        # On one engine samples are queued together: once one had a second output, all are there.
        group.closed = group.closed or (outputs and self._sample_groups.capacity.engines == 1)
        if group.live:
            return
        if group.closed or group.aborted:
            self._end(group)
            return
        self.wait_for_samples(group)
        # By this engine's clock: another host's may be any other.
        group.deadline = now + GROUP_TIMEOUT
        if len(self._open) > MAX_WAITING_GROUPS:
            self._end(next(iter(self._open.values())))

    def abort_all(self, numbers: Iterable[int]) -> None:
        """Samples of these questions were cut off here, one for each time that one is named.

        As if each had left, aborted; written out, since there may be very many.
        """
        groups = self._sample_groups.groups
        for number in numbers:
            group = groups[number]
            group.live -= 1
            group.aborted = True
            if not group.live:
                del groups[number]

    def expire(self, now: float) -> None:
        """End the questions that no sample joins any more."""
        while self._open:
            group = next(iter(self._open.values()))
            if now < group.deadline:
                break
            self._end(group)

    def clear(self) -> None:
        """End all that wait here: this engine's clock may start anew."""
        while self._open:
            self._end(next(iter(self._open.values())))

    def close(self) -> None:
        """This engine takes part in no question any more; what it observed last waits to be counted."""
        self.clear()
        self._closed = True

    def _end(self, group: SampleGroup) -> None:
        del self._sample_groups.groups[group.number]
        self._open.pop(group.number, None)
        # One without its first sample only looks like a question's, or began unheard.
        owner = self if group.owner is None or group.owner._closed else group.owner
        if not group.aborted and group.samples == group.highest + 1:
            owner.observed.append((group.samples, group.longest))
