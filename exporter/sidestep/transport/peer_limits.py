"""Limits on what an exporter may send to a sender, and on its silence."""

from __future__ import annotations

SILENCE = 15
"""Seconds after which a connection to an unresponsive host is closed."""
MAX_ANSWER_BYTES = 64 << 10
"""Maximum size of a message from an exporter; the largest lists histogram bounds."""
FRAMES, FRAMES_PER_SECOND = 1000, 100
"""An exporter acknowledges at most every 50 ms, and may reject each frame of a window."""
BYTES, BYTES_PER_SECOND = 1 << 20, 64 << 10
TOO_MUCH = "it sends more than an exporter should"


class Allowance:
    """A token bucket for the frames and bytes that a sender receives over one connection."""

    def __init__(self, now: float) -> None:
        self._frames, self._bytes = float(FRAMES), float(BYTES)
        self._at = now

    def spend(self, frames: int, size: int, now: float) -> bool:
        """Take ``frames`` frames and ``size`` bytes; return whether they were allowed."""
        age, self._at = now - self._at, now
        self._frames = min(self._frames + age * FRAMES_PER_SECOND, FRAMES) - frames
        self._bytes = min(self._bytes + age * BYTES_PER_SECOND, BYTES) - size
        return self._frames >= 0 and self._bytes >= 0
