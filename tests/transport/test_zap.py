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


REQUEST = [b"", b"1.0", b"1", b"sidestep", b"127.0.0.1", b"", b"CURVE", b"k" * 32]


def answer(
    context: zmq.Context[zmq.Socket[bytes]], authenticator: Authenticator, request: list[bytes]
) -> list[bytes]:
    """Return the handler's answer to a request of libzmq's; empty if there is none."""
    with context.socket(zmq.DEALER) as asking:
        asking.connect("inproc://zeromq.zap.01")
        asking.send_multipart(request)
        authenticator.socket.poll(5000)
        authenticator.serve()
        return asking.recv_multipart(zmq.NOBLOCK) if asking.poll(100) else []


def test_a_failing_check_denies_the_key_and_later_checks_work(
    context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    """An exception ends pyzmq's own handler, which then denies every peer."""
    checks = iter([1, 0])

    def allows(_: str) -> bool:
        return bool(1 / (1 - next(checks)))

    denied: list[int] = []
    authenticator = Authenticator(context, allows, lambda: denied.append(1))
    with authenticator.socket:
        assert b"200" not in answer(context, authenticator, REQUEST)
        assert not authenticator.up
        assert "ZeroDivisionError" in caplog.text
        assert b"200" in answer(context, authenticator, REQUEST)
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
    "request_",
    [
        REQUEST[:2],
        [b"no end"],
        [*REQUEST[:3], b"other", *REQUEST[4:]],
        [*REQUEST[:6], b"NULL"],
        [*REQUEST[:7], b"k" * 31],
    ],
)
def test_malformed_zap_requests_are_not_approved(
    request_: list[bytes], context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Another domain, another mechanism, an incomplete request."""
    authenticator = Authenticator(context, lambda _: True, lambda: None)
    with authenticator.socket:
        assert b"200" not in answer(context, authenticator, request_)
