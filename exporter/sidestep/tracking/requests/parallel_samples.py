"""Parallel samples of one request (``n`` > 1): their number, and the length of the longest.

A front end may distribute the samples of one request to several engines, whose events arrive in any
order. The group of samples counts for the engine whose sample ended last, according to the stamps.
Events of a front end have ``n``: its group is complete with as many samples. Events of a core do not.
Their group is complete once all engines of its deployment have reported all requests that reached them
until some time after its last end. Otherwise its number is unknown.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from sidestep.protocol.request_events import Queued
from sidestep.tracking.requests.inflight import RequestCapacity

GROUP_TIMEOUT = 5.0
"""Seconds after a sample's end until which the other samples of its group are queued."""
QUEUE_TIMEOUT = 3600.0
"""Seconds after a sample's end until which one of ``expected`` samples, which may queue, has an output."""
PEER_TIMEOUT = 60.0
"""Further seconds to wait for engines that have not reported all requests until then."""
MAX_WAITING_GROUPS = 4096
"""Groups that wait at one engine, and groups with an unknown number that are remembered."""


@dataclasses.dataclass(slots=True, eq=False)
class SampleGroup:
    """The samples of one request, on any engines.

    Attributes:
        live: Samples in flight.
        samples: Samples seen so far.
        expected: Number of its samples; 0: unknown.
        longest: Tokens of the longest sample that ended.
        arrival: Unix time at which the first sample arrived.
        ended: Stamp of the latest end of a sample.
        ended_at: Unix time of the latest end of a sample.
        owner: Engine of the sample that ended last, for which the group counts.
        deadline: Time until which ``waits`` waits for further samples.
        closed: Whether no further sample can join.
        waits: Engine at which the group waits for samples that may still arrive.
    """

    number: int
    live: int = 0
    samples: int = 0
    longest: int = 0
    highest: int = -1
    arrival: float = math.inf
    ended: float = -1.0
    ended_at: float = 0.0
    owner: EngineSamples | None = None
    deadline: float = 0.0
    aborted: bool = False
    closed: bool = False
    waits: EngineSamples | None = None
    expected: int = 0


class SampleGroups:
    """The state that the engines of one exporter share.

    Attributes:
        groups: Groups with a sample in flight, or which may still get one, by number.
        given_up: Arrivals of groups that ended without some of their samples, by number, oldest first.
        engines: The engines that send events of requests, by deployment.
    """

    def __init__(self) -> None:
        self.groups: dict[int, SampleGroup] = {}
        self.given_up: dict[int, float] = {}
        self.engines: dict[str, list[EngineSamples]] = {}
        self.capacity = RequestCapacity()


class EngineSamples:
    """The samples of one engine.

    Attributes:
        observed: Number of samples, and tokens of the longest, of each group that ended here since
            this list was last emptied. Groups with an aborted sample are not included.
        unknown: Groups that may lack samples and ended here, since this was last set to 0.
        known_until: Unix time up to which all requests that reached the engine are known; 0.0: the
            engine does not report that, and is not waited for.
        interrupted_until: Unix time up to which requests may be unknown because events are missing.

    Args:
        deployment: Engines of other deployments have no samples of the same requests.
    """

    def __init__(self, sample_groups: SampleGroups, deployment: str = "") -> None:
        self.observed: list[tuple[int, int]] = []
        self.unknown = 0
        self.known_until = self.interrupted_until = 0.0
        self._sample_groups = sample_groups
        self._deployment = deployment
        self._peers = sample_groups.engines.setdefault(deployment, [])
        self._peers.append(self)
        self._open: dict[int, SampleGroup] = {}
        self._closed = False

    def advance(self, known_until: float) -> None:
        """Note that requests which reached the engine before ``known_until`` are known."""
        if known_until:
            self.known_until = known_until
            self.interrupted_until = min(self.interrupted_until, known_until)

    def interrupt(self) -> None:
        """Note that events are missing, among them perhaps those of new requests."""
        if self.known_until:
            self.interrupted_until = math.inf

    def join(self, queued: Queued) -> bool:
        """Add a sample queued here to its group; return False if the group was given up."""
        number = queued.group
        if self._sample_groups.given_up.get(number) == queued.arrival:
            # Only samples of the same request have the same arrival; ids may repeat.
            return False
        group = self._sample_groups.groups.get(number)
        if group is None:
            group = self._sample_groups.groups[number] = SampleGroup(number)
        if group.waits is not None:
            del group.waits._open[number]
            group.waits = None
        group.live += 1
        group.samples += 1
        group.expected = queued.samples
        group.highest = max(group.highest, queued.sample)
        group.arrival = min(group.arrival, queued.arrival)
        return True

    def wait_for_samples(self, group: SampleGroup) -> None:
        """Wait until the deadline of ``group`` for samples that may still arrive."""
        self._open[group.number] = group
        group.waits = self

    def leave(
        self, number: int, now: float, wall: float, tokens: int, *, aborted: bool, outputs: bool
    ) -> None:
        """Remove a sample that ended here; ``outputs``: whether it had more than one output."""
        group = self._sample_groups.groups[number]
        group.live -= 1
        group.aborted = group.aborted or aborted
        group.longest = max(group.longest, tokens)
        group.ended_at = max(group.ended_at, wall)
        if now > group.ended:
            group.ended, group.owner = now, self
        if group.expected:
            group.closed = group.samples == group.expected
        elif outputs and len(self._peers) == 1:
            # A single engine queues all samples at once, so all are known at the second output of one.
            group.closed = True
        if group.live:
            return
        if group.closed or group.aborted:
            self._end(group)
            return
        self.wait_for_samples(group)
        # In this engine's clock, since other hosts' clocks differ.
        group.deadline = now + (QUEUE_TIMEOUT if group.expected else GROUP_TIMEOUT)
        if len(self._open) > MAX_WAITING_GROUPS:
            self._end(next(iter(self._open.values())))

    def abort_all(self, numbers: Iterable[int]) -> None:
        """Remove one sample, as aborted, for each of ``numbers``, which may repeat a group.

        It does the same as many calls of ``leave``, but faster.
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
            is_waiting = not group.expected and not self._are_all_known(group)
            if is_waiting and now < group.deadline + PEER_TIMEOUT:
                break
            self._end(group)

    def clear(self) -> None:
        """End all groups that wait here, since the engine's clock may be reset."""
        while self._open:
            self._end(next(iter(self._open.values())))

    def close(self) -> None:
        """Detach the engine; the caller counts ``observed`` afterwards."""
        self.clear()
        self._closed = True
        self._peers.remove(self)
        if not self._peers:
            del self._sample_groups.engines[self._deployment]

    def _are_all_known(self, group: SampleGroup) -> bool:
        """Return whether all engines have reported the requests that may belong to ``group``."""
        until = group.ended_at + GROUP_TIMEOUT
        return all(
            peer.known_until >= until and peer.interrupted_until <= group.arrival
            for peer in self._peers
            if peer is not self and peer.known_until
        )

    def _end(self, group: SampleGroup) -> None:
        del self._sample_groups.groups[group.number]
        self._open.pop(group.number, None)
        owner = self if group.owner is None or group.owner._closed else group.owner
        # vLLM makes no group of one sample: others are missing, or an id only resembles a sample's.
        is_complete = 1 < group.samples == group.highest + 1 and (
            group.samples == group.expected if group.expected else self._are_all_known(group)
        )
        if is_complete and not group.aborted:
            owner.observed.append((group.samples, group.longest))
        if is_complete:
            return
        self.unknown += not group.aborted
        given_up = self._sample_groups.given_up
        given_up.pop(group.number, None)
        given_up[group.number] = group.arrival
        if len(given_up) > MAX_WAITING_GROUPS:
            del given_up[next(iter(given_up))]
