"""The sequencer with lost, repeated, reordered and replayed messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidestep_adapters.streams.sequence import (
    LOST_LIMIT,
    REPLAY_BACKOFF,
    REPLAY_TIMEOUT,
    WINDOW,
    Accepted,
    Discontinuity,
    Sequencer,
    Step,
)

BEGUN = Discontinuity(0, restarted=False, from_start=True)
LATE = Discontinuity(0, restarted=False, from_start=False)
RESTARTED = Discontinuity(0, restarted=True, from_start=False)


def lost(messages: int) -> Discontinuity:
    """Return the discontinuity of a loss."""
    return LATE._replace(lost=messages)


def payload(seq: int, incarnation: int = 0) -> bytes:
    """Return the payload of that message; no two are equal."""
    return f"{incarnation}:{seq}".encode()


def live(sequence: Sequencer, *seqs: int, incarnation: int = 0, now: float = 0.0) -> list[object]:
    """Pass live messages; return the accepted numbers and discontinuities."""
    steps: list[object] = []
    for seq in seqs:
        steps += outcomes(sequence.live(seq, payload(seq, incarnation), now))
    return steps


def replay(
    sequence: Sequencer, *seqs: int, incarnation: int = 0, now: float = 0.0, end: bool = True
) -> list[object]:
    """Pass messages of a replay; return the accepted numbers and discontinuities."""
    steps: list[object] = []
    for seq in seqs:
        steps += outcomes(sequence.replayed(seq, payload(seq, incarnation), now))
    return [*steps, *outcomes(sequence.replay_ended(now))] if end else steps


def outcomes(steps: Iterable[Step]) -> list[object]:
    """Return the numbers of accepted messages, and discontinuities unchanged."""
    return [
        int(step.payload.rpartition(b":")[2]) if isinstance(step, Accepted) else step
        for step in steps
    ]


def started(*, replays: bool = True, upto: int = 3) -> Sequencer:
    """Return a sequencer that has accepted the numbers below ``upto``."""
    sequence = Sequencer(replays=replays)
    assert live(sequence, *range(upto)) == [BEGUN, *range(upto)]
    return sequence


@pytest.mark.parametrize(("first", "from_start"), [(0, True), (1, True), (2, False), (700, False)])
def test_messages_before_the_subscription_are_no_loss(first: int, from_start: bool) -> None:
    """Publishers count from 0 or from 1; any other first number was subscribed late."""
    sequence = Sequencer(replays=False)

    assert live(sequence, first) == [
        Discontinuity(0, restarted=False, from_start=from_start),
        first,
    ]


def test_a_gap_without_a_replay_is_lost() -> None:
    """No replay is available, or it lacks the messages."""
    assert live(started(replays=False), 6) == [lost(3), 6]

    sequence = started()
    live(sequence, 6)
    assert replay(sequence, 5, 6) == [lost(2), 5, 6]


def test_a_replay_times_out() -> None:
    """Later gaps are lost at once, until the connection is new."""
    sequence = started()
    live(sequence, 5)

    assert outcomes(sequence.expire(REPLAY_TIMEOUT / 2)) == []
    assert outcomes(sequence.expire(REPLAY_TIMEOUT)) == [lost(2), 5]
    assert live(sequence, 8, now=REPLAY_TIMEOUT + 1) == [lost(2), 8]
    sequence.connected(REPLAY_TIMEOUT + 2)
    assert sequence.replay_from == 8
    list(sequence.expire(2 * REPLAY_TIMEOUT + 2))
    live(sequence, 11, now=2 * REPLAY_TIMEOUT + 2 + REPLAY_BACKOFF)
    assert sequence.replay_from == 8


def test_a_publisher_restart_is_detected() -> None:
    """A number has another content, or is much too low."""
    sequence = started(replays=False)
    assert live(sequence, 0, 1, incarnation=1) == [RESTARTED, BEGUN, 0, 1]

    sequence = started(replays=False, upto=WINDOW + 9)
    assert live(sequence, 3, incarnation=1) == [RESTARTED, lost(2), 3]
    assert (sequence.restarts, sequence.duplicates) == (1, 0)


@pytest.mark.parametrize("replays", [False, True])
def test_a_restart_while_the_exporter_was_down_is_detected(*, replays: bool) -> None:
    """The numbers are lower than the saved one, and no replay tells more."""
    position = started(upto=WINDOW).position
    sequence = Sequencer(replays=replays, position=position)
    sequence.connected(0.0)
    assert outcomes(sequence.expire(REPLAY_TIMEOUT)) == []

    steps = live(sequence, 500, 501, incarnation=1, now=REPLAY_TIMEOUT)
    assert steps == [RESTARTED, lost(499), 500, 501]
    assert sequence.duplicates == 0


def test_a_restart_behind_a_gap_is_detected() -> None:
    """The last accepted message has another content, or is missing."""
    sequence = started()
    live(sequence, 5, incarnation=1)
    assert replay(sequence, 2, incarnation=1, end=False) == [RESTARTED]
    assert replay(sequence, 0, 1, 2, 3, 4, 5, incarnation=1) == [BEGUN, 0, 1, 2, 3, 4, 5]

    sequence = started()
    sequence.connected(0.0)
    assert replay(sequence) == [RESTARTED]
    assert replay(sequence, 0, 1, incarnation=1) == [BEGUN, 0, 1]
    assert live(sequence, 1, 2, incarnation=1) == [2]


def test_a_gap_has_a_limit() -> None:
    """A publisher may send any number."""
    sequence = started(replays=False)

    assert live(sequence, 1 << 62)[0] == lost(LOST_LIMIT)
    assert sequence.position is not None
    assert sequence.position.seq == 1 << 62


@dataclasses.dataclass
class World:
    """A publisher, its messages in transit, and a subscriber."""

    sequence: Sequencer
    retained: int = 0
    incarnation: int = 0
    published: list[bytes] = dataclasses.field(default_factory=list)
    in_transit: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)
    outcomes: list[Any] = dataclasses.field(default_factory=list)
    reconnected: bool = True
    now: float = 0.0
    replay_requests: int = 0

    def publish(self, copies: int) -> None:
        """Publish one message, of which ``copies`` are sent."""
        seq = len(self.published)
        self.published.append(payload(seq, self.incarnation))
        self.in_transit += [(seq, self.published[-1])] * copies

    def is_ours(self, payload: bytes) -> bool:
        """Return True for a message of the present process."""
        return payload.startswith(f"{self.incarnation}:".encode())

    def swap(self) -> None:
        """Swap two messages of one process that can still be replayed."""
        if (
            len(self.in_transit) > 1
            and not self.reconnected
            and min(seq for seq, _ in self.in_transit[-2:])
            in range(len(self.published))[-self.retained :]
            and all(self.is_ours(payload) for _, payload in self.in_transit[-2:])
        ):
            self.in_transit[-2:] = self.in_transit[:-3:-1]

    def restart(self) -> None:
        """Restart the publisher; a restart takes longer than messages are in transit."""
        if self.reconnected:
            self.drain()
        self.incarnation += 1
        self.published = []
        self.reconnected = self.sequence.connection_lost = True

    def follow(self, steps: Iterable[Step]) -> None:
        """Record the outcomes."""
        for step in steps:
            if isinstance(step, Accepted):
                incarnation, _, seq = step.payload.partition(b":")
                self.outcomes.append((int(incarnation), int(seq)))
            else:
                self.outcomes.append(step)

    def drain(self, drop: frozenset[int] = frozenset()) -> None:
        """Deliver everything; ``drop`` lists the positions of replayed messages to lose."""
        self.now += REPLAY_BACKOFF
        for _ in range(1000):
            if (replay_from := self.sequence.replay_from) is not None:
                self.replay(replay_from, drop)
                # Drops do not last.
                drop = frozenset()
            elif self.in_transit:
                self.follow(self.sequence.live(*self.in_transit.pop(0), self.now))
            elif self.reconnected:
                self.reconnected = False
                self.sequence.connected(self.now)
            else:
                return
        raise AssertionError("it never comes to an end")

    def replay(self, replay_from: int, drop: frozenset[int]) -> None:
        """Replay the retained messages."""
        replay_requests = self.sequence.replay_requests
        self.replay_requests += 1
        there = list(enumerate(self.published))[-self.retained :]
        wanted = [each for each in there if each[0] >= replay_from]
        # The first message of a replay finds an empty queue.
        missing = drop - {0}
        for place, (seq, one) in enumerate(wanted):
            if place not in missing:
                self.follow(self.sequence.replayed(seq, one, self.now))
            if self.sequence.replay_requests != replay_requests:
                return
        if len(wanted) in missing:
            self.now += REPLAY_TIMEOUT
            self.follow(self.sequence.expire(self.now))
        else:
            self.follow(self.sequence.replay_ended(self.now))


OPERATIONS = st.one_of(
    st.tuples(st.just("publish"), st.sampled_from([0, 1, 1, 1, 1, 2])),
    st.tuples(st.just("swap"), st.none()),
    st.tuples(st.just("restart"), st.none()),
    st.tuples(st.just("drain"), st.frozensets(st.integers(0, 6), max_size=2)),
)


LOST_END = [("publish", 1), ("publish", 0), ("publish", 1), ("drain", frozenset({1, 2}))]
"""Operations in which the end of a replay is lost, with all that is new."""


@settings(max_examples=200)
@example(LOST_END, True, 0)
@given(st.lists(OPERATIONS, max_size=60), st.booleans(), st.sampled_from([0, 3]))
def test_each_message_is_accepted_once_and_in_order(
    operations: list[tuple[str, Any]], replays: bool, retained: int
) -> None:
    """Losses are reported, and messages that can be recovered arrive."""
    world = World(Sequencer(replays=replays), retained)
    for what, argument in operations:
        match what:
            case "publish":
                world.publish(argument)
            case "drain":
                world.drain(argument)
            case "swap" if replays:
                world.swap()
                world.drain()
            case "restart":
                world.restart()
    world.drain()
    world.publish(1)
    world.drain()

    accepted = [step for step in world.outcomes if not isinstance(step, Discontinuity)]
    assert accepted[-1] == (world.incarnation, len(world.published) - 1)
    assert accepted == sorted(set(accepted))
    for one, other in pairwise(world.outcomes):
        if not isinstance(one, Discontinuity) and not isinstance(other, Discontinuity):
            # Nothing shows a restart that is lost as far as the very next number.
            assert other[1] == one[1] + 1
    if replays and not retained and world.incarnation == 0:
        assert accepted == [(0, seq) for seq in range(len(world.published))]
        assert not sum(step.lost for step in world.outcomes if isinstance(step, Discontinuity))
