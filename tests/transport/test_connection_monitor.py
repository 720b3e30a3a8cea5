"""The state of a libzmq socket that connects, over real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from fuzz import zmtp_peer as raw

from sidestep.transport.client_socket import ConnectionMonitor, Socket, dealer

PATIENCE = 20.0


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    """A context of libzmq."""
    with zmq.Context() as made:
        yield made


def connect(context: zmq.Context[Socket], endpoint: str) -> tuple[Socket, ConnectionMonitor]:
    """Connect a socket that is monitored."""
    socket = dealer(context, None)
    monitor = ConnectionMonitor(socket, endpoint)
    socket.connect(endpoint)
    return socket, monitor


def until(monitor: ConnectionMonitor, condition: Callable[[], object]) -> None:
    """Read ``monitor`` until ``condition`` holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        list(monitor.events())
        time.sleep(0.005)


def test_a_connection_that_comes_and_goes(context: zmq.Context[Socket], tmp_path: Path) -> None:
    """A problem is gone with the next connection."""
    path = tmp_path / "i.ipc"
    socket, monitor = connect(context, f"ipc://{path}")
    until(monitor, lambda: monitor.problem)
    with context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{path}")
        until(monitor, lambda: monitor.connected)
        assert monitor.problem == ""
        assert monitor.descriptor >= 0
    until(monitor, lambda: not monitor.connected)
    until(monitor, lambda: monitor.problem)
    assert monitor.descriptor == -1
    monitor.close()
    socket.close(linger=0)


def test_a_peer_that_ends_the_handshake(context: zmq.Context[Socket]) -> None:
    """The text ends with what the owner of the monitor has to say."""
    server = raw.listen(("127.0.0.1", 0))
    with context.socket(zmq.SUB) as socket:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        monitor = ConnectionMonitor(socket, endpoint, "is it a publisher?")
        socket.connect(endpoint)
        server.accept()[0].close()
        until(monitor, lambda: monitor.problem)
        problem = monitor.problem
        monitor.close()
    server.close()

    assert problem == "the handshake fails: is it a publisher?"
