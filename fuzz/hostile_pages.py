"""Hostile servers of a polled page: they accept a request, and then misbehave."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Mapping

from fuzz import zmtp_peer as zmtp
from fuzz.hostile_exporter import Behaviour

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"
BODY = b"".join(b'x_total{n="%d"} 1\n' % number for number in range(10_000))


def requested(peer: socket.socket) -> None:
    """Read a request.

    Raises:
        OSError: No request comes.
    """
    peer.settimeout(zmtp.TIMEOUT)
    received = b""
    while b"\r\n\r\n" not in received:
        received = received[-3:] + (peer.recv(1 << 16) or zmtp.closed())


def continues_without_end(peer: socket.socket, _: int) -> None:
    """Answer that the request may continue, for ever."""
    requested(peer)
    while True:
        peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


def cut_body(peer: socket.socket, number: int) -> None:
    """Announce more bytes than follow, and reset."""
    requested(peer)
    peer.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (1 << 24))
    peer.sendall(BODY * (number % 30))


def body_without_end(peer: socket.socket, _: int) -> None:
    """Send a body that never ends."""
    requested(peer)
    peer.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    chunk = b"%x\r\n" % len(BODY) + BODY + b"\r\n"
    while True:
        peer.sendall(chunk)


def slow_body(peer: socket.socket, _: int) -> None:
    """Send a byte now and then."""
    requested(peer)
    peer.sendall(HEAD + b"\r\n")
    for number in itertools.count():
        peer.sendall(BODY[number % len(BODY) :][:1])
        time.sleep(0.1)


def other_page_each_time(peer: socket.socket, number: int) -> None:
    """Serve families, labels and values that differ from those of the poll before."""
    requested(peer)
    names = (b"f%d" % (100 * number + one) for one in range(100))
    lines = b"".join(
        b'# TYPE %b gauge\n%b{a="%b"} -1e308\n' % (name, name, name * 9) for name in names
    )
    peer.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(lines) + lines)


PAGES: Mapping[str, Behaviour] = {
    behaviour.__name__: behaviour
    for behaviour in (
        continues_without_end,
        cut_body,
        body_without_end,
        slow_body,
        other_page_each_time,
    )
}
