"""Which messages of a publisher are taken, once and in order: gaps, replays, restarts. No I/O.

A publisher numbers its messages, keeps the last ones for whoever asks, and says nothing of
which process it is: after a restart its numbers begin anew. What is told of a message here is a
checksum of its beginning, where its time stands, so that one number with two of
them shows a restart, and with the same one a message that came twice.

1. A number that was expected is taken.
2. A higher one waits while what is missing is asked for, from the last message taken on: should that
   be another by now, the publisher is another as well. What nobody has any more is lost.
3. A lower one that was taken before, alike, is a duplicate; so is one that an answer overtook.
   Any other lower one is a restart's.
4. A connection that is new is asked likewise, since what was missed shows by no number yet.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator
from typing import NamedTuple

FIRST_SEQ = 1
"""Publishers count from 0 or from 1: before either nothing can be missing."""
MAX_SEQ = 1 << 62
"""No number is higher."""
WINDOW = 4096
"""Messages whose checksums are known: more than a socket holds that a replay overtakes."""
CHECKSUM_MASK = (1 << 32) - 1
CHECKSUM_BYTES = 128
"""Bytes that a checksum is of."""
REPLAY_TIMEOUT = 3.0
"""Seconds without a message that helps after which an answer is taken for ended."""
REPLAY_BACKOFF = 30.0
"""Seconds after an answer that never came until anybody is asked again."""
LOST_LIMIT = 1 << 40
"""Of one gap: a publisher may say any number."""


class Accepted(NamedTuple):
    """To be taken, as the next one."""

    payload: bytes
    replayed: bool


class Discontinuity(NamedTuple):
    """What comes next does not continue what came before.

    Attributes:
        lost: Messages that nobody has any more.
        restarted: Whether the publisher is another process, of which nothing is known yet.
        whole: Whether what comes is all that the publisher ever said.
    """

    lost: int
    restarted: bool
    from_start: bool


Step = Accepted | Discontinuity


class Position(NamedTuple):
    """How far a stream was taken: the last number, and its message's checksum."""

    seq: int
    checksum: int


class Sequencer:
    """One publisher's messages.

    Args:
        replays: Whether there is somebody to ask for what is missing.
        position: Where an earlier process stopped.

    Attributes:
        doubtful: Whether the connection was lost and messages of before may still come: who would
            answer need not be who said them, so nothing is asked for. Ends with ``connected``.
        asked: From which number on messages are asked for; ``None``: nothing is. While it is
            something no live message may be given.
        requests: Times that something was asked for; each is to have answers of its own.
        duplicates: Messages that had been taken before, or come too late.
        gaps: Times that a number was not the expected one.
        restarts: Times that the publisher was another process.
    """

    def __init__(self, *, replays: bool, position: Position | None = None) -> None:
        self.connection_lost = False
        self.replay_from: int | None = None
        self.replay_requests = self.duplicates = self.gaps = self.restarts = 0
        self._replays = replays
        self._checksums = array("I", [0]) * WINDOW
        self._expected: int | None = None
        self._first = 0
        self._newest = -1
        self._restarted = False
        self._waiting: tuple[int, bytes] | None = None
        self._replay_started = self._replay_advanced = self._replay_overlaps = self._is_retried = (
            False
        )
        self._deadline = self._next_request_at = float("-inf")
        if position is not None:
            self._first, self._expected = position.seq, position.seq + 1
            self._checksums[position.seq % WINDOW] = position.checksum

    @property
    def position(self) -> Position | None:
        """How far the stream is taken."""
        if self._expected is None:
            return None
        seq = self._expected - 1
        return Position(seq, self._checksums[seq % WINDOW])

    def live(self, seq: int, payload: bytes, now: float) -> Iterator[Step]:
        """A message as it is published."""
        expected = self._expected
        # Those that wait in the socket rise, wherever an answer has overtaken them.
        rises, self._newest = seq >= self._newest, seq
        if seq == expected:
            yield self._accept(seq, payload)
        elif expected is None or seq > expected:
            if expected is not None:
                self.gaps += 1
            if seq and not self.connection_lost and self._request_replay(now):
                self._waiting = seq, payload
            else:
                yield from self._skip_to(seq)
                yield self._accept(seq, payload)
        elif self._is_duplicate(seq, expected, payload, late=rises):
            self.duplicates += 1
        else:
            yield self._restart()
            yield from self.live(seq, payload, now)

    def replayed(self, seq: int, payload: bytes, now: float) -> Iterator[Step]:
        """A message of an answer."""
        if self.replay_from is None:
            self.duplicates += 1
            return
        expected, first = self._expected, not self._replay_started
        self._replay_started = True
        if expected is not None and seq < expected:
            if not self._is_duplicate(seq, expected, payload, late=True):
                yield self._restart()
                self._request_replay(now)
            elif not first:
                self.duplicates += 1
            else:
                self._replay_overlaps = True
            return
        if expected is not None and seq > expected and self._is_incomplete():
            self._request_replay(now)
            return
        if seq != expected:
            yield from self._skip_to(seq)
        self._replay_advanced = True
        self._deadline = now + REPLAY_TIMEOUT
        yield self._accept(seq, payload, replayed=True)

    def replay_ended(self, now: float) -> Iterator[Step]:
        """The answer is complete."""
        if self.replay_from is None:
            return
        if not self._replay_started and self._expected is not None and self._waiting is None:
            # It had what was taken last, or later ones: this is none that ever did.
            yield self._restart()
            self._request_replay(now)
            return
        yield from self._finish_replay(now)

    def connected(self, now: float) -> None:
        """The connection is new, and all that came over an earlier one has been given."""
        self._next_request_at = float("-inf")
        self.connection_lost = False
        if self.replay_from is None:
            self._request_replay(now)

    def expire(self, now: float) -> Iterator[Step]:
        """Wait no longer than one has to."""
        if self.replay_from is not None and now >= self._deadline:
            if not self._replay_started:
                self._next_request_at = now + REPLAY_BACKOFF
            yield from self._finish_replay(now)

    def _finish_replay(self, now: float) -> Iterator[Step]:
        """No more will be answered: go on with what waits."""
        waiting, advanced = self._waiting, self._replay_advanced
        self.replay_from = self._waiting = None
        if waiting is None:
            return
        seq, payload = waiting
        expected = self._expected
        if expected is not None and seq < expected:
            self.duplicates += 1
        elif seq != expected and advanced and self._request_replay(now):
            self._waiting = waiting
        else:
            if seq != expected:
                yield from self._skip_to(seq)
            yield self._accept(seq, payload)

    def _request_replay(self, now: float) -> bool:
        """Ask for what comes after, or nothing is known yet; whether anybody can be asked."""
        if not self._replays or now < self._next_request_at:
            return False
        self.replay_from = 0 if self._expected is None else max(self._expected - 1, 0)
        self.replay_requests += 1
        self._replay_started = self._replay_advanced = self._replay_overlaps = False
        self._deadline = now + REPLAY_TIMEOUT
        return True

    def _is_incomplete(self) -> bool:
        """Whether a part of the answer is missing: what was sent too fast is dropped on the way.

        One that joins what was taken, and has nothing of what comes next, is asked for
        once more: a publisher may say so for ever.
        """
        incomplete = self._replay_advanced or (self._replay_overlaps and not self._is_retried)
        self._is_retried |= incomplete and not self._replay_advanced
        return incomplete

    def _accept(self, seq: int, payload: bytes, *, replayed: bool = False) -> Accepted:
        self._checksums[seq % WINDOW] = checksum(payload)
        self._expected = seq + 1
        self._is_retried = False
        return Accepted(payload, replayed)

    def _skip_to(self, seq: int) -> Iterator[Discontinuity]:
        """Go on at ``seq``, whatever is before it."""
        expected = self._expected
        if expected is None:
            # What was said before this process came is nobody's loss.
            lost = max(seq - FIRST_SEQ, 0) if self._restarted else 0
            self._first, self._restarted = seq, False
            yield Discontinuity(min(lost, LOST_LIMIT), restarted=False, from_start=seq <= FIRST_SEQ)
            return
        for missed in range(max(expected, seq - WINDOW), seq):
            self._checksums[missed % WINDOW] = 0
        yield Discontinuity(min(seq - expected, LOST_LIMIT), restarted=False, from_start=False)

    def _is_duplicate(self, seq: int, expected: int, payload: bytes, *, late: bool) -> bool:
        """Whether a message of a number that was passed is the same publisher's.

        ``late``: it is where nothing is known of that number.
        """
        known = self._checksums[seq % WINDOW]
        if not known or seq < max(self._first, expected - WINDOW):
            return late
        return known == checksum(payload)

    def _restart(self) -> Discontinuity:
        """Know nothing of the publisher, which is another."""
        self.restarts += 1
        self._restarted = True
        # What comes now is the new one's.
        self.connection_lost = False
        self._newest = -1
        self._expected = self.replay_from = self._waiting = None
        return Discontinuity(0, restarted=True, from_start=False)


def checksum(payload: bytes) -> int:
    """Of a message's beginning; never 0."""
    return zlib.crc32(payload[:CHECKSUM_BYTES], len(payload)) or 1
