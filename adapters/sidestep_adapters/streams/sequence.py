"""Sequencing of a publisher's messages: each once and in order, despite gaps and restarts. No I/O.

A publisher numbers its messages, keeps the last ones for replay requests and does not identify
its process: after a restart its numbers start again. The sequencer therefore remembers a
checksum of each message's beginning, which contains its time: one number with two checksums
shows a restart, one number with the same checksum a duplicate.

1. A message with the expected number is accepted.
2. A message with a higher number waits while a replay is requested, from the last accepted message
   on: if that one differs now, the publisher has restarted. What no replay returns is lost.
3. A message with a lower number is a duplicate if it was accepted before with the same checksum, or
   if a replay overtook it. Any other lower number shows a restart.
4. A new connection also requests a replay, since its missed messages show as no gap yet.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator
from typing import NamedTuple

FIRST_SEQ = 1
"""Publishers start at 0 or at 1: no message can be missing before either."""
MAX_SEQ = 1 << 62
"""Highest valid number."""
WINDOW = 4096
"""Number of remembered checksums: more than the messages in a socket that a replay overtakes."""
CHECKSUM_MASK = (1 << 32) - 1
CHECKSUM_BYTES = 128
"""Number of bytes that a checksum covers."""
REPLAY_TIMEOUT = 3.0
"""Seconds without a useful message after which a replay counts as ended."""
REPLAY_BACKOFF = 30.0
"""Seconds until the next request after a replay request without any response."""
LOST_LIMIT = 1 << 40
"""Maximum loss counted for one gap: a publisher may send any number."""


class Accepted(NamedTuple):
    """A message to deliver next."""

    payload: bytes
    replayed: bool


class Discontinuity(NamedTuple):
    """A break in the stream: the next message does not continue the previous one.

    Attributes:
        lost: Messages that cannot be recovered.
        restarted: Whether the publisher is a new process, whose state is unknown.
        from_start: Whether the next message is the publisher's first one.
    """

    lost: int
    restarted: bool
    from_start: bool


Step = Accepted | Discontinuity


class Position(NamedTuple):
    """How far a stream is accepted: the last number, and its message's checksum."""

    seq: int
    checksum: int


class Sequencer:
    """Puts one publisher's messages in order.

    Args:
        replays: Whether missing messages can be requested.
        position: Where an earlier process stopped.

    Attributes:
        connection_lost: Whether the connection was lost while older messages may still arrive.
            A replay could come from another process, so none is requested. ``connected`` ends
            this state.
        replay_from: First number of the replay in progress; ``None`` without one. During a
            replay the caller must not pass live messages.
        replay_requests: Replays requested so far; each needs a socket of its own.
        duplicates: Messages that were accepted before, or arrived too late.
    """

    def __init__(self, *, replays: bool, position: Position | None = None) -> None:
        self.connection_lost = False
        self.replay_from: int | None = None
        self.replay_requests = self.duplicates = self.gaps = self.restarts = 0
        self._replays = replays
        self._checksums = array("I", [0]) * WINDOW
        self._known_from = 0
        """First number since the publisher's start that may have a checksum."""
        self._expected: int | None = None
        """Next number; ``None`` before any message of the publisher process."""
        self._last_live = -1
        self._restarted = False
        """True if the publisher has restarted, and no message of the new process is accepted."""
        self._waiting: tuple[int, bytes] | None = None
        """The live message beyond a gap that the replay in progress may fill."""
        self._replay_started = self._replay_advanced = self._replay_overlaps = False
        self._is_retried = False
        """True if a replay that overlapped but lacked the next message was requested again."""
        self._deadline = self._next_request_at = float("-inf")
        if position is not None:
            self._known_from, self._expected = position.seq, position.seq + 1
            # No replay of this process has overtaken a message before it: such a one shows a restart.
            self._last_live = position.seq
            self._checksums[position.seq % WINDOW] = position.checksum

    @property
    def position(self) -> Position | None:
        """Return how far the stream is accepted; ``None`` before any message."""
        if self._expected is None:
            return None
        seq = self._expected - 1
        return Position(seq, self._checksums[seq % WINDOW])

    def live(self, seq: int, payload: bytes, now: float) -> Iterator[Step]:
        """Process a published message."""
        expected = self._expected
        # Messages that a replay has overtaken in the socket have increasing numbers.
        rises, self._last_live = seq >= self._last_live, seq
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
        """Process a message of a replay."""
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
        """Process the end of a replay."""
        if self.replay_from is None:
            return
        if not self._replay_started and self._expected is not None and self._waiting is None:
            # The publisher had the last accepted message or later ones; this one has neither.
            yield self._restart()
            self._request_replay(now)
            return
        yield from self._finish_replay(now, ended=True)

    def connected(self, now: float) -> None:
        """Start on a new connection, after all messages of earlier ones were passed."""
        self._next_request_at = float("-inf")
        self.connection_lost = False
        if self.replay_from is None:
            self._request_replay(now)

    def expire(self, now: float) -> Iterator[Step]:
        """End a replay that takes too long."""
        if self.replay_from is not None and now >= self._deadline:
            if not self._replay_started:
                self._next_request_at = now + REPLAY_BACKOFF
            yield from self._finish_replay(now, ended=False)

    def _finish_replay(self, now: float, *, ended: bool) -> Iterator[Step]:
        """Continue with the waiting message, or request what is missing before it once more."""
        waiting = self._waiting
        self.replay_from = self._waiting = None
        if waiting is None:
            return
        seq, payload = waiting
        expected = self._expected
        if expected is not None and seq < expected:
            self.duplicates += 1
        elif (
            seq != expected
            and (self._is_incomplete() if ended else self._replay_advanced)
            and self._request_replay(now)
        ):
            self._waiting = waiting
        else:
            if seq != expected:
                yield from self._skip_to(seq)
            yield self._accept(seq, payload)

    def _request_replay(self, now: float) -> bool:
        """Request all messages after the last accepted one; return whether that is possible."""
        if not self._replays or now < self._next_request_at:
            return False
        self.replay_from = 0 if self._expected is None else max(self._expected - 1, 0)
        self.replay_requests += 1
        self._replay_started = self._replay_advanced = self._replay_overlaps = False
        self._deadline = now + REPLAY_TIMEOUT
        return True

    def _is_incomplete(self) -> bool:
        """Return whether messages of the replay are missing: a publisher that sends too fast drops some.

        A replay that overlaps the accepted messages but lacks the next one is requested only once
        more, because a publisher may send such replays forever.
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
        """Continue at ``seq`` and give up the messages before it."""
        expected = self._expected
        if expected is None:
            # Messages published before this process started are not a loss.
            lost = max(seq - FIRST_SEQ, 0) if self._restarted else 0
            self._known_from, self._restarted = seq, False
            yield Discontinuity(min(lost, LOST_LIMIT), restarted=False, from_start=seq <= FIRST_SEQ)
            return
        for missed in range(max(expected, seq - WINDOW), seq):
            self._checksums[missed % WINDOW] = 0
        yield Discontinuity(min(seq - expected, LOST_LIMIT), restarted=False, from_start=False)

    def _is_duplicate(self, seq: int, expected: int, payload: bytes, *, late: bool) -> bool:
        """Return whether a message with a lower number comes from the same publisher process.

        ``late`` is the result for a number whose checksum is unknown.
        """
        known = self._checksums[seq % WINDOW]
        if not known or seq < max(self._known_from, expected - WINDOW):
            return late
        return known == checksum(payload)

    def _restart(self) -> Discontinuity:
        """Forget the publisher's state: it is a new process."""
        self.restarts += 1
        self._restarted = True
        # The next messages are those of the new process.
        self.connection_lost = False
        self._last_live = -1
        self._expected = self.replay_from = self._waiting = None
        return Discontinuity(0, restarted=True, from_start=False)


def checksum(payload: bytes) -> int:
    """Return a checksum of a message's beginning; never 0."""
    return zlib.crc32(payload[:CHECKSUM_BYTES], len(payload)) or 1
