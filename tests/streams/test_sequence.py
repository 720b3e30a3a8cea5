"""Messages of a publisher through everything that can happen to them on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep_adapters.streams.sequence import (
    LOST_LIMIT,
    REPLAY_BACKOFF,
    REPLAY_TIMEOUT,
    WINDOW,
    Accepted,
    Discontinuity,
    Position,
    Sequencer,
    Step,
)

BEGUN = Discontinuity(0, restarted=False, from_start=True)
RESTARTED = Discontinuity(0, restarted=True, from_start=False)


def payload(seq: int, incarnation: int = 0) -> bytes:
    """Of that message: no two are alike."""
    return f"{incarnation}:{seq}".encode()


def live(sequence: Sequencer, *seqs: int, incarnation: int = 0, now: float = 0.0) -> list[object]:
    """What became of live messages: numbers of those taken, and breaks."""
    steps: list[object] = []
    for seq in seqs:
        steps += told(sequence.live(seq, payload(seq, incarnation), now))
    return steps


def answer(
    sequence: Sequencer, *seqs: int, incarnation: int = 0, now: float = 0.0, end: bool = True
) -> list[object]:
    """Likewise, of an answer."""
    steps: list[object] = []
    for seq in seqs:
        steps += told(sequence.replayed(seq, payload(seq, incarnation), now))
    return [*steps, *told(sequence.replay_ended(now))] if end else steps


def told(steps: Iterable[Step]) -> list[object]:
    """Numbers of messages, and breaks as they are."""
    return [
        int(step.payload.rpartition(b":")[2]) if isinstance(step, Accepted) else step
        for step in steps
    ]


def begun(*, replays: bool = True, upto: int = 3) -> Sequencer:
    """One that has taken the numbers below ``upto``."""
    sequence = Sequencer(replays=replays)
    assert live(sequence, *range(upto)) == [BEGUN, *range(upto)]
    return sequence


def test_numbers_in_order_are_taken() -> None:
    """The first one breaks with nothing, and nothing is missing before it."""
    sequence = begun()

    assert live(sequence, 3, 4) == [3, 4]
    assert (sequence.gaps, sequence.duplicates, sequence.replay_requests) == (0, 0, 0)


@pytest.mark.parametrize(("first", "from_start"), [(0, True), (1, True), (2, False), (700, False)])
def test_what_was_said_before_is_nobodys_loss(first: int, from_start: bool) -> None:
    """A publisher counts from 0 or from 1; from any other number on it was heard too late."""
    sequence = Sequencer(replays=False)

    assert live(sequence, first) == [
        Discontinuity(0, restarted=False, from_start=from_start),
        first,
    ]


def test_a_late_start_asks_for_what_there_is() -> None:
    """Before any message: what the publisher still has is taken, and then what it says."""
    sequence = Sequencer(replays=True)
    sequence.connected(0.0)

    assert sequence.replay_from == 0
    assert answer(sequence, 5, 6, 7) == [
        Discontinuity(0, restarted=False, from_start=False),
        5,
        6,
        7,
    ]
    assert live(sequence, 6, 7, 8) == [8]
    assert (sequence.duplicates, sequence.gaps) == (2, 0)


def test_a_gap_is_filled() -> None:
    """From the last one taken on, which proves that the publisher is the same."""
    sequence = begun()

    assert live(sequence, 6) == []
    assert sequence.replay_from == 2
    assert answer(sequence, 2, 3, 4, 5, 6, 7) == [3, 4, 5, 6, 7]
    assert live(sequence, 7, 8) == [8]
    assert sequence.gaps == 1


def test_a_gap_that_nobody_fills_is_lost() -> None:
    """Without anybody to ask, or who has it."""
    assert live(begun(replays=False), 6) == [Discontinuity(3, restarted=False, from_start=False), 6]

    sequence = begun()
    live(sequence, 6)
    assert answer(sequence, 5, 6) == [Discontinuity(2, restarted=False, from_start=False), 5, 6]


def test_an_answer_with_a_hole_is_asked_for_again() -> None:
    """What is sent too fast is dropped on the way; as long as there is progress it will come."""
    sequence = begun()
    live(sequence, 9)

    assert answer(sequence, 2, 3, 4, 7, end=False) == [3, 4]
    assert (sequence.replay_from, sequence.replay_requests) == (4, 2)
    assert answer(sequence, 4) == [Discontinuity(4, restarted=False, from_start=False), 9]


def test_an_answer_without_its_end_part_is_asked_for_again() -> None:
    """Until it brings nothing more."""
    sequence = begun()
    live(sequence, 7)

    assert answer(sequence, 2, 3, 4) == [3, 4]
    assert sequence.replay_from == 4
    assert answer(sequence, 4, 5, 6, 7) == [5, 6, 7]


def test_nobody_answers() -> None:
    """It takes a while, once; then what is missing is lost at once, until the connection is new."""
    sequence = begun()
    live(sequence, 5)

    assert told(sequence.expire(REPLAY_TIMEOUT / 2)) == []
    assert told(sequence.expire(REPLAY_TIMEOUT)) == [
        Discontinuity(2, restarted=False, from_start=False),
        5,
    ]
    assert live(sequence, 8, now=REPLAY_TIMEOUT + 1) == [
        Discontinuity(2, restarted=False, from_start=False),
        8,
    ]
    sequence.connected(REPLAY_TIMEOUT + 2)
    assert sequence.replay_from == 8
    list(sequence.expire(2 * REPLAY_TIMEOUT + 2))
    live(sequence, 11, now=2 * REPLAY_TIMEOUT + 2 + REPLAY_BACKOFF)
    assert sequence.replay_from == 8


def test_an_answer_that_brings_nothing_new_is_not_waited_for() -> None:
    """Only what helps keeps an answer going."""
    sequence = begun()
    live(sequence, 5)

    assert answer(sequence, 2, 1, 2, 1, now=REPLAY_TIMEOUT * 0.9, end=False) == []
    assert told(sequence.expire(REPLAY_TIMEOUT)) == [
        Discontinuity(2, restarted=False, from_start=False),
        5,
    ]


def test_a_message_that_comes_again_is_left_out() -> None:
    """The same number with the same content."""
    sequence = begun(replays=False)
    live(sequence, 5)

    assert live(sequence, 5, 2, 0, 6) == [6]
    assert (sequence.duplicates, sequence.restarts) == (3, 0)


def test_what_an_answer_overtook_is_left_out() -> None:
    """Also where the publisher did not have it any more."""
    sequence = Sequencer(replays=True)

    assert live(sequence, 4) == []
    assert answer(sequence, 7, 8) == [Discontinuity(0, restarted=False, from_start=False), 7, 8]
    assert live(sequence, 5, 6, 7, 8, 9) == [9]
    assert (sequence.duplicates, sequence.restarts) == (5, 0)


def test_a_publisher_begins_anew() -> None:
    """One number with another content, or one that is long gone."""
    sequence = begun(replays=False)
    assert live(sequence, 0, 1, incarnation=1) == [RESTARTED, BEGUN, 0, 1]

    sequence = begun(replays=False, upto=WINDOW + 9)
    assert live(sequence, 3, incarnation=1) == [
        RESTARTED,
        Discontinuity(2, restarted=False, from_start=False),
        3,
    ]
    assert (sequence.restarts, sequence.duplicates) == (1, 0)


def test_a_restart_loses_nothing_that_is_kept() -> None:
    """The new publisher is asked from its beginning."""
    sequence = begun()

    assert live(sequence, 2, incarnation=1) == [RESTARTED]
    assert sequence.replay_from == 0
    assert answer(sequence, 0, 1, 2, 3, incarnation=1) == [BEGUN, 0, 1, 2, 3]
    assert live(sequence, 3, 4, incarnation=1) == [4]


def test_a_restart_behind_a_gap_shows() -> None:
    """The last message taken has another content by now, or is not there."""
    sequence = begun()
    live(sequence, 5, incarnation=1)
    assert answer(sequence, 2, incarnation=1, end=False) == [RESTARTED]
    assert answer(sequence, 0, 1, 2, 3, 4, 5, incarnation=1) == [BEGUN, 0, 1, 2, 3, 4, 5]

    sequence = begun()
    sequence.connected(0.0)
    assert answer(sequence) == [RESTARTED]
    assert answer(sequence, 0, 1, incarnation=1) == [BEGUN, 0, 1]
    assert live(sequence, 1, 2, incarnation=1) == [2]


def test_a_new_connection_brings_what_was_missed() -> None:
    """No message need show the gap."""
    sequence = begun()
    sequence.connected(0.0)

    assert answer(sequence, 2, 3, 4) == [3, 4]
    assert (sequence.restarts, sequence.gaps) == (0, 0)


def test_nobody_is_asked_for_what_another_said() -> None:
    """Messages of before the connection was lost may still come, and who would answer is new."""
    sequence = begun()
    sequence.connection_lost = True

    assert live(sequence, 5) == [Discontinuity(2, restarted=False, from_start=False), 5]
    assert live(sequence, 3, 2, incarnation=1) == [RESTARTED]
    assert answer(sequence, 0, 1, 2, 3, incarnation=1) == [BEGUN, 0, 1, 2, 3]


def test_an_answer_after_its_time_is_left_out() -> None:
    """Nothing is asked for any more."""
    sequence = begun()

    assert answer(sequence, 3, 4) == []
    assert sequence.duplicates == 2


def test_another_process_goes_on_where_one_stopped() -> None:
    """By number and checksum: it asks, and knows whether the publisher is the same."""
    position = begun().position
    assert position is not None
    same, other = (Sequencer(replays=True, position=position) for _ in range(2))

    same.connected(0.0)
    assert answer(same, 2, 3) == [3]
    other.connected(0.0)
    assert answer(other, 2, incarnation=1, end=False) == [RESTARTED]


def test_a_gap_has_a_limit() -> None:
    """A publisher may say any number."""
    sequence = begun(replays=False)

    assert live(sequence, 1 << 62)[0] == Discontinuity(
        LOST_LIMIT, restarted=False, from_start=False
    )
    assert sequence.position == Position((1 << 62), cast("Position", sequence.position).checksum)


def test_an_answer_that_lost_its_first_new_message_is_asked_for_once_more() -> None:
    """It joins what was taken, so what is missing was dropped on the way; or is never told."""
    sequence = begun()
    sequence.connected(0.0)

    assert answer(sequence, 2, 4, end=False) == []
    assert sequence.replay_requests == 2
    assert answer(sequence, 2, 4) == [Discontinuity(1, restarted=False, from_start=False), 4]


@dataclasses.dataclass
class World:
    """A publisher, what is on the way from it, and a subscriber that does what it has to.

    Attributes:
        kept: Messages that the publisher keeps; 0 is all.
    """

    sequence: Sequencer
    kept: int = 0
    incarnation: int = 0
    said: list[bytes] = dataclasses.field(default_factory=list)
    way: list[tuple[int, bytes]] = dataclasses.field(default_factory=list)
    taken: list[object] = dataclasses.field(default_factory=list)
    is_new: bool = True
    now: float = 0.0
    replay_requests: int = 0

    def publish(self, copies: int) -> None:
        """Say one thing more, which sets out so often."""
        seq = len(self.said)
        self.said.append(payload(seq, self.incarnation))
        self.way += [(seq, self.said[-1])] * copies

    def swap(self) -> None:
        """Let one overtake another of the same process, which can still be asked for it."""
        ours = f"{self.incarnation}:".encode()
        if (
            len(self.way) > 1
            and not self.is_new
            and min(seq for seq, _ in self.way[-2:]) in range(len(self.said))[-self.kept :]
            and all(each[1].startswith(ours) for each in self.way[-2:])
        ):
            self.way[-2:] = self.way[:-3:-1]

    def restart(self) -> None:
        """Be another process."""
        self.incarnation += 1
        self.said = []
        self.is_new = self.sequence.connection_lost = True

    def follow(self, steps: Iterable[Step]) -> None:
        """Do what was decided."""
        for step in steps:
            if isinstance(step, Accepted):
                incarnation, _, seq = step.payload.partition(b":")
                self.taken.append((int(incarnation), int(seq)))
            else:
                self.taken.append(step)

    def settle(self, drop: frozenset[int] = frozenset()) -> None:
        """Do all there is to do; ``drop`` are places in answers that do not arrive."""
        self.now += REPLAY_BACKOFF
        for _ in range(1000):
            if (replay_from := self.sequence.replay_from) is not None:
                self.serve(replay_from, drop)
            elif self.way:
                self.follow(self.sequence.live(*self.way.pop(0), self.now))
            elif self.is_new:
                self.is_new = False
                self.sequence.connected(self.now)
            else:
                return
        raise AssertionError("it never comes to an end")

    def serve(self, replay_from: int, drop: frozenset[int]) -> None:
        """Answer with what is kept."""
        replay_requests = self.sequence.replay_requests
        self.replay_requests += 1
        # Drops do not last, and the first message of an answer finds an empty queue.
        missing = {place - self.replay_requests for place in drop} - {0}
        there = list(enumerate(self.said))[-self.kept :]
        wanted = [each for each in there if each[0] >= replay_from]
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
    st.tuples(st.just("settle"), st.frozensets(st.integers(0, 6), max_size=2)),
)


@settings(max_examples=1000)
@given(st.lists(OPERATIONS, max_size=60), st.booleans(), st.sampled_from([0, 3]))
def test_each_message_is_taken_once_and_in_order(
    operations: list[tuple[str, object]], replays: bool, kept: int
) -> None:
    """Dropped, repeated, swapped, restarted: what is missing is said, and what can be had comes."""
    world = World(Sequencer(replays=replays), kept)
    for what, argument in operations:
        match what:
            case "publish":
                world.publish(cast("int", argument))
            case "settle":
                world.settle(cast("frozenset[int]", argument))
            case "swap" if replays:
                world.swap()
                world.settle()
            case "restart":
                world.restart()
    world.settle()
    world.publish(1)
    world.settle()

    taken = [
        step
        for step in world.taken
        if isinstance(step, tuple) and not isinstance(step, Discontinuity)
    ]
    assert taken[-1] == (world.incarnation, len(world.said) - 1)
    assert taken == sorted(set(taken))
    for one, other in pairwise(world.taken):
        if isinstance(one, Discontinuity) or isinstance(other, Discontinuity):
            continue
        # Nothing shows a restart that is lost as far as the very next number.
        assert cast("tuple[int, int]", other)[1] == cast("tuple[int, int]", one)[1] + 1
    if replays and not kept and world.incarnation == 0:
        assert taken == [(0, seq) for seq in range(len(world.said))]
        assert not sum(step.lost for step in world.taken if isinstance(step, Discontinuity))
