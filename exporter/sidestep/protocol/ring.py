"""Frames that a sender keeps until they are known to outlive the exporter."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence


@dataclasses.dataclass(slots=True)
class Chunk:
    """A frame, which never changes once it was sent, and the seqs in it."""

    first: int
    last: int
    frame: bytes


class Ring:
    """Frames in the order of their seqs: sent and applied, sent, not sent.

    Attributes:
        used: Bytes of all of them.
        in_flight: Bytes of those sent and not known to be applied.
    """

    def __init__(self) -> None:
        self.used = self.in_flight = 0
        self._chunks: deque[Chunk] = deque()
        self._next = 0
        """Index of the next one to send."""
        self._flying: deque[tuple[int, int]] = deque()
        """Last seq and size of each that is in flight."""

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def first(self) -> int | None:
        """The lowest seq held."""
        return self._chunks[0].first if self._chunks else None

    @property
    def next(self) -> Chunk | None:
        """What is to be sent next."""
        return self._chunks[self._next] if self._next < len(self._chunks) else None

    def append(self, first: int, last: int, frame: bytes) -> None:
        """Keep a frame, to be sent after all others."""
        self._chunks.append(Chunk(first, last, frame))
        self.used += len(frame)

    def sent(self) -> None:
        """What was next is on its way."""
        chunk = self._chunks[self._next]
        self._next += 1
        self._flying.append((chunk.last, len(chunk.frame)))
        self.in_flight += len(chunk.frame)

    def land(self, applied: int) -> None:
        """All up to the seq ``applied`` have arrived."""
        while self._flying and self._flying[0][0] <= applied:
            self.in_flight -= self._flying.popleft()[1]

    def free(self, durable: int) -> None:
        """All up to the seq ``durable`` outlive the exporter."""
        while self._chunks and self._chunks[0].last <= durable:
            self.used -= len(self._chunks.popleft().frame)
            self._next = max(self._next - 1, 0)

    def resume(self, applied: int) -> None:
        """Whatever was on its way is lost: go on behind the seq ``applied``."""
        self._next = sum(chunk.last <= applied for chunk in self._chunks)
        self._flying.clear()
        self.in_flight = 0

    def replace(self, applied: int, make: Callable[[int, int], Sequence[Chunk]]) -> int:
        """Put others in the place of the first chunk behind ``applied``; how many seqs it had.

        ``make`` makes them, of its first and its last seq.
        """
        for index, chunk in enumerate(self._chunks):
            if chunk.first > applied:
                others = make(chunk.first, chunk.last)
                del self._chunks[index]
                for place, other in enumerate(others, start=index):
                    self._chunks.insert(place, other)
                self.used += sum(len(other.frame) for other in others) - len(chunk.frame)
                return chunk.last - chunk.first + 1
        return 0

    def clear(self) -> None:
        """Let go of all."""
        self._chunks.clear()
        self._flying.clear()
        self.used = self.in_flight = self._next = 0
