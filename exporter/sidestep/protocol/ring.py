"""Ring of the frames that a sender retains until the exporter has acknowledged them as durable."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence


@dataclasses.dataclass(slots=True)
class Chunk:
    """A frame, which never changes once it is sent, and its range of seqs."""

    first: int
    last: int
    frame: bytes


class Ring:
    """Frames in the order of their seqs: sent and applied, in flight, not sent.

    Attributes:
        used: Bytes of all frames.
        in_flight: Bytes of the frames sent and not acknowledged as applied.
    """

    def __init__(self) -> None:
        self.used = self.in_flight = 0
        self._chunks: deque[Chunk] = deque()
        self._next = 0
        """Index of the next frame to send."""
        self._flying: deque[tuple[int, int]] = deque()
        """Last seq and size of each frame in flight."""

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def first(self) -> int | None:
        """The lowest seq held."""
        return self._chunks[0].first if self._chunks else None

    @property
    def next(self) -> Chunk | None:
        """The next frame to send, if any."""
        return self._chunks[self._next] if self._next < len(self._chunks) else None

    def append(self, first: int, last: int, frame: bytes) -> None:
        """Append a frame, to be sent after all others."""
        self._chunks.append(Chunk(first, last, frame))
        self.used += len(frame)

    def mark_sent(self) -> None:
        """Mark the next frame as sent."""
        chunk = self._chunks[self._next]
        self._next += 1
        self._flying.append((chunk.last, len(chunk.frame)))
        self.in_flight += len(chunk.frame)

    def mark_applied(self, applied: int) -> None:
        """Mark all frames up to the seq ``applied`` as applied."""
        while self._flying and self._flying[0][0] <= applied:
            self.in_flight -= self._flying.popleft()[1]

    def free(self, durable: int) -> None:
        """Free all frames up to the seq ``durable``."""
        while self._chunks and self._chunks[0].last <= durable:
            self.used -= len(self._chunks.popleft().frame)
            self._next = max(self._next - 1, 0)

    def resume(self, applied: int) -> None:
        """Treat the frames in flight as lost: send again all frames after the seq ``applied``."""
        self._next = sum(chunk.last <= applied for chunk in self._chunks)
        self._flying.clear()
        self.in_flight = 0

    def replace(self, applied: int, make: Callable[[int, int], Sequence[Chunk]]) -> int:
        """Replace the first chunk after ``applied`` by those of ``make``; return how many seqs it had."""
        for index, chunk in enumerate(self._chunks):
            if chunk.first > applied:
                others = make(chunk.first, chunk.last)
                del self._chunks[index]
                for position, other in enumerate(others, start=index):
                    self._chunks.insert(position, other)
                self.used += sum(len(other.frame) for other in others) - len(chunk.frame)
                return chunk.last - chunk.first + 1
        return 0

    def clear(self) -> None:
        """Drop all frames."""
        self._chunks.clear()
        self._flying.clear()
        self.used = self.in_flight = self._next = 0
