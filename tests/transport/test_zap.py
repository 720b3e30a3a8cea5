"""The handler of CURVE handshakes, with sockets of the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from sidestep.transport.endpoint import require_keys, router
from sidestep.transport.listener import Authenticator


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A context whose sockets drop what is unsent when they are closed."""
    with zmq.Context() as made:
        made.linger = 0
        yield made


def test_a_failing_check_denies_the_key_and_later_checks_work(
    context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    """An exception ends pyzmq's own handler, which then denies every peer."""
    public, secret = zmq.curve_keypair()
    failing = True

    def allows(key: str) -> bool:
        if failing:
            raise ZeroDivisionError
        return key == public.decode()

    denied: list[int] = []
    authenticator = Authenticator(context, allows, lambda: denied.append(1))
    server = router(context)
    server_public, server_secret = zmq.curve_keypair()
    require_keys(server, server_secret)
    port = server.bind_to_random_port("tcp://127.0.0.1")

    def gets_through() -> bool:
        with zmq.Context() as own, own.socket(zmq.DEALER) as client:
            client.linger = 0
            client.curve_publickey, client.curve_secretkey = public, secret
            client.curve_serverkey = server_public
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(b"x")
            for _ in range(500):
                # Requests of the previous connection may still be pending.
                authenticator.serve()
                if server.poll(10):
                    return True
                if failing and not authenticator.up:
                    break
            return bool(server.poll(300))

    with authenticator.socket, server:
        assert not gets_through()
        assert not authenticator.up
        assert "ZeroDivisionError" in caplog.text
        failing = False
        assert gets_through()
        assert authenticator.up
    assert not denied


def test_without_a_zap_handler_no_peer_is_accepted(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """By default libzmq would accept every key then."""
    with router(context) as server, context.socket(zmq.DEALER) as client:
        public, secret = zmq.curve_keypair()
        require_keys(server, secret)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        client.curve_serverkey = public
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(b"x")

        assert not server.poll(500)


@pytest.mark.parametrize(
    "frames",
    [
        [b"", b"1.0"],
        [b"no end"],
        [b"", b"1.0", b"1", b"other", b"127.0.0.1", b"", b"CURVE", b"k" * 32],
        [b"", b"1.0", b"1", b"sidestep", b"127.0.0.1", b"", b"NULL"],
        [b"", b"1.0", b"1", b"sidestep", b"127.0.0.1", b"", b"CURVE", b"k" * 31],
    ],
)
def test_malformed_zap_requests_are_not_approved(
    frames: list[bytes], context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Another domain, another mechanism, an incomplete request."""
    authenticator = Authenticator(context, lambda _: True, lambda: None)
    with authenticator.socket, context.socket(zmq.DEALER) as asking:
        asking.connect("inproc://zeromq.zap.01")
        asking.send_multipart(frames)
        authenticator.socket.poll(5000)
        authenticator.serve()
        answer = asking.recv_multipart(zmq.NOBLOCK) if asking.poll(100) else []

    assert b"200" not in answer
