"""libzmq options of every socket that a peer can reach.

libzmq 4.3.5 ends the process by an assertion where a peer made its input stop, at the receive
mark, and resets the connection before an answer to a heartbeat or the heartbeat timer is due.
So no socket has a receive mark, and none a heartbeat timer: TCP's keepalive finds peers whose
host has vanished. See docs/decisions/0011-sockets-that-a-peer-cannot-kill.md.
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
    # A peer that takes nothing any more: the kernel's own patience is 15 minutes.
    (zmq.TCP_MAXRT, SILENCE * 1000),
)


def reachable(frame_bytes: int) -> tuple[tuple[int, int], ...]:
    """Return the options of a socket that takes frames of at most ``frame_bytes``."""
    return *_OPTIONS, (zmq.MAXMSGSIZE, frame_bytes)
