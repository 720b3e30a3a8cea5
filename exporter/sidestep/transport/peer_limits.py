"""Limits on what a peer may send and on its silence, and the libzmq options that apply them."""

from __future__ import annotations

import zmq

SILENCE = 15
"""Seconds after which a connection to an unresponsive host is closed."""
MAX_ANSWER_BYTES = 64 << 10
"""Maximum size of a message from an exporter; the largest lists histogram bounds."""
FRAMES, FRAMES_PER_SECOND = 1000, 100
"""Burst and rate of frames: an exporter acknowledges every 50 ms, and may reject a whole window."""
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


_OPTIONS = (
    (zmq.LINGER, 0),
    # No receive high-water mark and no heartbeat timer: libzmq 4.3.5 aborts the process when a peer
    # has filled the queue and resets the connection before a heartbeat is due (see decision 0011).
    (zmq.RCVHWM, 0),
    (zmq.HANDSHAKE_IVL, 3000),
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, SILENCE // 3),
    (zmq.TCP_KEEPALIVE_INTVL, SILENCE // 3),
    (zmq.TCP_KEEPALIVE_CNT, 2),
    # For a peer that stops reading: the kernel's default timeout is 15 minutes.
    (zmq.TCP_MAXRT, SILENCE * 1000),
)


def options_for(frame_bytes: int) -> tuple[tuple[int, int], ...]:
    """Return the options of a socket that a peer can reach; it accepts ``frame_bytes`` a frame."""
    return *_OPTIONS, (zmq.MAXMSGSIZE, frame_bytes)
