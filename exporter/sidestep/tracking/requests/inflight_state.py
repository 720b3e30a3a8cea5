"""Snapshot structs of requests in flight, and their capture and restoration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import msgspec

from sidestep.tracking.requests.inflight import Request
from sidestep.tracking.requests.machine import RequestTracker
from sidestep.tracking.requests.parallel_samples import EngineSamples, SampleGroup, SampleGroups
from sidestep.tracking.requests.steps import Steps

CHUNK = 1024
"""Requests in one piece, which takes half a millisecond to encode."""


class TrackerState(msgspec.Struct, array_like=True, gc=False, tag="l"):
    """The state of an engine's request tracker, except its requests."""

    engine: str
    source: int | None
    step: float | None
    prefilling: list[int]
    given_up: list[int]
    cut_off: int


class RequestsState(msgspec.Struct, array_like=True, gc=False, tag="r"):
    """Some of an engine's requests, in the order of their first events."""

    engine: str
    numbers: list[int]
    requests: list[Request]


ENDED_GROUP = 0
"""Number of a group that has ended and is not observed yet."""


class GroupState(msgspec.Struct, array_like=True, gc=False, tag="g"):
    """A group of parallel samples; ``owner`` and ``waits`` are engines, or empty."""

    number: int
    deadline: float
    ended: float
    live: int
    samples: int
    longest: int
    highest: int
    aborted: bool
    closed: bool
    owner: str
    waits: str


def capture_tracker(
    engine: str, lifecycle: RequestTracker
) -> Iterator[TrackerState | RequestsState]:
    """Yield the pieces of an engine's tracker, which must not change in between."""
    requests = lifecycle.requests
    yield TrackerState(
        engine,
        lifecycle.source,
        lifecycle.steps.last,
        list(requests.prefilling),
        list(requests.given_up),
        requests.cut_off,
    )
    numbers, live = iter(requests.live), iter(requests.live.values())
    while some := list(islice(numbers, CHUNK)):
        yield RequestsState(engine, some, list(islice(live, CHUNK)))


def capture_groups(
    sample_groups: SampleGroups, engines: Mapping[str, EngineSamples]
) -> Iterator[GroupState]:
    """Yield the groups of all engines; ``engines`` has the samples of each engine by its name."""
    names = {id(siblings): engine for engine, siblings in engines.items()}
    for group in sample_groups.groups.values():
        yield GroupState(
            group.number,
            group.deadline,
            group.ended,
            group.live,
            group.samples,
            group.longest,
            group.highest,
            group.aborted,
            group.closed,
            names.get(id(group.owner), ""),
            names.get(id(group.waits), ""),
        )
    for engine, siblings in engines.items():
        for samples, longest in siblings.observed:
            yield GroupState(
                ENDED_GROUP, 0.0, 0.0, 0, samples, longest, samples - 1, False, True, engine, ""
            )


def restore_tracker(lifecycle: RequestTracker, kept: TrackerState) -> None:
    """Restore the state of a tracker, except its requests."""
    lifecycle.source = kept.source
    lifecycle.steps = Steps(kept.step)
    requests = lifecycle.requests
    requests.prefilling.update(kept.prefilling)
    requests.given_up.update(kept.given_up)
    requests.cut_off = kept.cut_off


def restore_requests(lifecycle: RequestTracker, kept: RequestsState) -> None:
    """Restore requests, and the counts that follow from their states."""
    requests = lifecycle.requests
    for number, request in zip(kept.numbers, kept.requests, strict=True):
        requests.restore(number, request)


def sort_preempted(lifecycle: RequestTracker) -> None:
    """Sort the preempted requests by time, after all requests are restored."""
    requests = lifecycle.requests
    waiting = sorted((since, number) for number, since in requests.preempted.items())
    requests.preempted = {number: since for since, number in waiting}


def restore_groups(
    sample_groups: SampleGroups, groups: Iterable[GroupState], engines: Mapping[str, RequestTracker]
) -> None:
    """Restore groups, after their engines; omit groups that do not match the requests."""
    asked = [request for found in engines.values() for request in found.requests.live.values()]
    live = Counter(request.group for request in asked)
    for kept in sorted(groups, key=lambda group: group.deadline):
        waits = engines.get(kept.waits)
        owner = engines.get(kept.owner)
        if kept.number == ENDED_GROUP:
            if owner is not None:
                owner.samples.observed.append((kept.samples, kept.longest))
            continue
        # A group waits for samples exactly when none is in flight.
        if kept.live != live[kept.number] or bool(kept.live) == bool(waits):
            continue
        group = sample_groups.groups[kept.number] = SampleGroup(kept.number)
        group.deadline, group.ended = kept.deadline, kept.ended
        group.live, group.samples = kept.live, kept.samples
        group.longest, group.highest = kept.longest, kept.highest
        group.aborted, group.closed = kept.aborted, kept.closed
        group.owner = None if owner is None else owner.samples
        if waits is not None:
            waits.samples.wait_for_samples(group)
    for request in asked:
        if request.group not in sample_groups.groups:
            request.group = 0
