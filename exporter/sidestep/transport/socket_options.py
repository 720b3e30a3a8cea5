"""libzmq options of every socket that a peer can reach.

libzmq 4.3.5 aborts on an assertion when a peer has filled the queue to the receive high-water
mark and resets the connection before a heartbeat reply or the heartbeat timer is due. So no
socket has a receive high-water mark or a heartbeat timer: TCP keepalive detects dead hosts. See docs/decisions/0011-sockets-that-a-peer-cannot-kill.md.
"""

from __future__ import annotations

import zmq

from sidestep.transport.peer_limits import SILENCE

_OPTIONS = (
    (zmq.LINGER, 0),
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
    """Return the options of a socket that accepts frames of at most ``frame_bytes``."""
    return *_OPTIONS, (zmq.MAXMSGSIZE, frame_bytes)
