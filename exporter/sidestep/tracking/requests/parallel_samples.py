"""Parallel samples of one request (``n`` > 1): their number, and the length of the longest.

A router may distribute the samples of one request to several engines, whose events arrive in any
order. The group of samples counts for the engine whose sample ended last, according to the stamps.
"""

from __future__ import annotations

from collections.abc import Iterable

from sidestep.tracking.requests.capacity import RequestCapacity

GROUP_TIMEOUT = 5.0
"""Seconds after a sample's end within which the events of all samples of its group arrive."""
MAX_WAITING_GROUPS = 4096


class SampleGroup:
    """The samples of one request, on any engines.

    Attributes:
        live: Samples in flight.
        samples: Samples seen so far.
        longest: Tokens of the longest sample that ended.
        highest: Highest index of a sample.
        ended: Stamp of the latest end of a sample.
        owner: The engine of that sample, for which the group counts.
        deadline: Time until which ``waits`` waits for further samples.
        aborted: Whether a sample was aborted.
        closed: Whether no further sample can join.
        waits: The engine at which the group waits for samples that may still arrive.
    """

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


class SampleGroups:
    """The state that the engines of one exporter share.

    Attributes:
        groups: Groups with a sample in flight, or which may still get one, by number.
        capacity: The shared limit on tracked requests.
    """

    def __init__(self) -> None:
        self.groups: dict[int, SampleGroup] = {}
        self.capacity = RequestCapacity()


class EngineSamples:
    """The samples of one engine.

    Attributes:
        observed: Number of samples, and tokens of the longest, of each group that ended here since
            this list was last emptied. Groups with an aborted sample are not included.
    """

    def __init__(self, sample_groups: SampleGroups) -> None:
        self.observed: list[tuple[int, int]] = []
        self._sample_groups = sample_groups
        self._open: dict[int, SampleGroup] = {}
        self._closed = False

    def join(self, number: int, sample: int) -> None:
        """Add a sample that was queued here to its group."""
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
        """Wait until the deadline of ``group`` for samples that may still arrive."""
        self._open[group.number] = group
        group.waits = self

    def leave(self, number: int, now: float, tokens: int, *, aborted: bool, outputs: bool) -> None:
        """Remove a sample that ended here.

        Args:
            number: The group's number.
            now: Stamp of the end.
            tokens: Tokens of the sample.
            aborted: Whether the sample was aborted.
            outputs: Whether the sample had more than one output.
        """
        group = self._sample_groups.groups[number]
        group.live -= 1
        group.aborted = group.aborted or aborted
        group.longest = max(group.longest, tokens)
        if now > group.ended:
            group.ended, group.owner = now, self
        # One engine queues all samples together: they are all known once one had a second output.
        group.closed = group.closed or (outputs and self._sample_groups.capacity.engines == 1)
        if group.live:
            return
        if group.closed or group.aborted:
            self._end(group)
            return
        self.wait_for_samples(group)
        # In this engine's clock, since other hosts' clocks differ.
        group.deadline = now + GROUP_TIMEOUT
        if len(self._open) > MAX_WAITING_GROUPS:
            self._end(next(iter(self._open.values())))

    def abort_all(self, numbers: Iterable[int]) -> None:
        """Remove one sample, as aborted, for each of ``numbers``, in which a group may occur repeatedly.

        This equals a call of ``leave`` for each, but is faster, since there may be very many.
        """
        groups = self._sample_groups.groups
        for number in numbers:
            group = groups[number]
            group.live -= 1
            group.aborted = True
            if not group.live:
                del groups[number]

    def expire(self, now: float) -> None:
        """End the groups whose deadline has passed."""
        while self._open:
            group = next(iter(self._open.values()))
            if now < group.deadline:
                break
            self._end(group)

    def clear(self) -> None:
        """End all groups that wait here, since the engine's clock may be reset."""
        while self._open:
            self._end(next(iter(self._open.values())))

    def close(self) -> None:
        """Detach the engine; the caller still has to count ``observed``."""
        self.clear()
        self._closed = True

    def _end(self, group: SampleGroup) -> None:
        del self._sample_groups.groups[group.number]
        self._open.pop(group.number, None)
        # A group that lacks a sample may not be a group at all, or began before the events did.
        owner = self if group.owner is None or group.owner._closed else group.owner
        if not group.aborted and group.samples == group.highest + 1:
            owner.observed.append((group.samples, group.longest))
