"""Requests in flight in a snapshot: its structs, their capture and their restoration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import msgspec

from sidestep.protocol.request_events import HANDED_OVER
from sidestep.tracking.requests.engine_times import EngineTimes
from sidestep.tracking.requests.front_end import FrontEndState
from sidestep.tracking.requests.inflight import Request
from sidestep.tracking.requests.limits import LimitTimes
from sidestep.tracking.requests.machine import RequestTracker
from sidestep.tracking.requests.parallel_samples import EngineSamples, SampleGroup, SampleGroups

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
    known_until: float = 0.0
    interrupted_until: float = 0.0
    front_ends: FrontEndState | None = None
    processes: int = 1
    sources: dict[int, int] = {}
    limits: LimitTimes | None = None
    times: EngineTimes | None = None


class RequestsState(msgspec.Struct, array_like=True, gc=False, tag="r"):
    """Some of an engine's requests, in the order of their first events."""

    engine: str
    numbers: list[int]
    requests: list[Request]


ENDED_GROUP = 0
"""Number of a group that has ended and is not observed yet."""


class GroupState(msgspec.Struct, array_like=True, gc=False, tag="g"):
    """A group of parallel samples; a group without samples was given up.

    ``owner`` and ``waits`` are names of engines, or empty.
    """

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
    arrival: float = 0.0
    ended_at: float = 0.0
    expected: int = 0


_SAME = tuple(name for name in GroupState.__struct_fields__ if name not in ("owner", "waits"))
"""Fields that have the same value in a group and in its state."""


def capture_tracker(engine: str, tracker: RequestTracker) -> Iterator[TrackerState | RequestsState]:
    """Yield the pieces of an engine's tracker, which must not change in between."""
    requests = tracker.requests
    yield TrackerState(
        engine,
        tracker.sources.get(0),
        tracker.outputs.last_step,
        list(requests.prefilling),
        list(requests.given_up),
        requests.cut_off,
        tracker.samples.known_until,
        tracker.samples.interrupted_until,
        tracker.reports.state(),
        tracker.processes,
        tracker.sources,
        tracker.limits,
        tracker.parts.times,
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
            **{name: getattr(group, name) for name in _SAME},
            owner=names.get(id(group.owner), ""),
            waits=names.get(id(group.waits), ""),
        )
    for number, arrival in sample_groups.given_up.items():
        yield GroupState(number, 0.0, 0.0, 0, 0, 0, -1, True, True, "", "", arrival)
    for engine, siblings in engines.items():
        for samples, longest in siblings.observed:
            yield GroupState(
                ENDED_GROUP, 0.0, 0.0, 0, samples, longest, samples - 1, False, True, engine, ""
            )


def restore(tracker: RequestTracker, state: TrackerState | RequestsState) -> None:
    """Restore the state of a tracker except its requests, or some of its requests."""
    requests = tracker.requests
    if isinstance(state, RequestsState):
        for number, request in zip(state.numbers, state.requests, strict=True):
            requests.restore(number, request)
            tracker.outputs.has_hand_overs |= request.transfer == HANDED_OVER
            if request.parts is not None:
                tracker.parts.restore(request.parts)
        return
    first = {} if state.source is None else {0: state.source}
    tracker.processes, tracker.sources = state.processes, state.sources or first
    tracker.outputs.last_step = state.step
    requests.prefilling.update(state.prefilling)
    requests.given_up.update(state.given_up)
    requests.cut_off = state.cut_off
    tracker.samples.known_until = state.known_until
    tracker.samples.interrupted_until = state.interrupted_until
    if state.front_ends is not None:
        tracker.reports.restore(state.front_ends)
    if state.limits is not None:
        tracker.limits = state.limits
    if state.times is not None:
        tracker.parts.times = state.times


def sort_preempted(tracker: RequestTracker) -> None:
    """Sort the preempted requests by time, after all requests are restored."""
    requests = tracker.requests
    waiting = sorted((since, number) for number, since in requests.preempted.items())
    requests.preempted = {number: since for since, number in waiting}


def restore_groups(
    sample_groups: SampleGroups, groups: Iterable[GroupState], engines: Mapping[str, RequestTracker]
) -> None:
    """Restore groups, after their engines; omit groups that do not match the requests."""
    asked = [request for found in engines.values() for request in found.requests.live.values()]
    live = Counter(request.group for request in asked)
    for state in sorted(groups, key=lambda group: group.deadline):
        waits = engines.get(state.waits)
        owner = engines.get(state.owner)
        if state.number == ENDED_GROUP:
            if owner is not None:
                owner.samples.observed.append((state.samples, state.longest))
            continue
        if not state.samples:
            sample_groups.given_up[state.number] = state.arrival
            continue
        # A group waits for samples exactly when none is in flight.
        if state.live != live[state.number] or bool(state.live) == bool(waits):
            continue
        group = SampleGroup(**{name: getattr(state, name) for name in _SAME})
        sample_groups.groups[state.number] = group
        group.owner = None if owner is None else owner.samples
        if waits is not None:
            waits.samples.wait_for_samples(group)
    for request in asked:
        if request.group not in sample_groups.groups:
            request.group = 0
