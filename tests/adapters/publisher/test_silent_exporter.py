"""Exporters that read nothing more, acknowledge for a while, and fall silent."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from fuzz import zmtp_peer as zmtp
from fuzz.hostile_exporter import answered, hostile_exporter

from exporters import until
from key_ring import Ring
from publishers_of_one import ENGINE
from sidestep.engines.vllm.wire import VllmStep
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import Ack, Hello, decode_from_sender, encode
from sidestep.protocol.sender import ACK_TIMEOUT
from sidestep.transport import keys
from sidestep_adapters.publisher.publisher import Publisher

PACE = 0.02
"""Seconds between two acknowledgements, so that one always comes within a flush."""
ANSWERING = 4.0
"""Seconds of acknowledgements, in which every buffer of the connection becomes full."""
RECEIVE_BYTES = 4096
STEP = IterationStats(3, inter_token_latencies_iter=[0.01] * 1000)


def repeat(send: Callable[[bytes], object], ack: Ack) -> None:
    """Acknowledge nothing, again and again."""
    ack.nonce = None
    deadline = time.monotonic() + ANSWERING
    while time.monotonic() < deadline:
        send(encode(ack))
        time.sleep(PACE)


@contextlib.contextmanager
def plain(folder: Path, silent: threading.Event) -> Iterator[str]:
    """Yield the path of an exporter that behaves so."""

    def behave(peer: socket.socket, number: int) -> None:
        repeat(lambda ack: peer.sendall(zmtp.frame(ack)), answered(peer, number))
        silent.set()
        left.wait()

    left = threading.Event()
    with hostile_exporter(folder / "x", behave) as hostile:
        try:
            yield hostile.endpoint
        finally:
            left.set()


@contextlib.contextmanager
def keyed(secret: bytes, silent: threading.Event) -> Iterator[str]:
    """Yield the port of an exporter that behaves so, and whose engines need keys."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.setsockopt(zmq.RCVHWM, 1)
        router.setsockopt(zmq.RCVBUF, RECEIVE_BYTES)
        router.curve_server, router.curve_secretkey = True, secret
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def behave() -> None:
            peer, frame = router.recv_multipart()
            hello = decode_from_sender(frame)
            assert isinstance(hello, Hello)
            ack = Ack(VERSION, 1, hello.incarnation, hello.nonce, 0, 0)
            router.send_multipart([peer, encode(ack)])
            repeat(lambda frame: router.send_multipart([peer, frame]), ack)
            silent.set()

        thread = threading.Thread(target=behave)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            thread.join()


@pytest.mark.parametrize("has_keys", [False, True], ids=["plain", "keys"])
async def test_silence_after_acknowledgements_ends_the_connection(
    has_keys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher's thread neither stays in one flush while they come, nor waits for ever afterwards."""
    silent = threading.Event()
    ring = Ring(tmp_path)
    ring.environ(monkeypatch, ring.engine("a"))
    opened = keyed(keys.read_secret(ring.secret), silent) if has_keys else plain(tmp_path, silent)
    with opened as endpoint:
        # Many small frames: libzmq queues a number of them, less than the window has bytes for.
        one = Publisher(endpoint, "s", [ENGINE], flush_interval=0.002)
        most = 0

        def pushed() -> None:
            nonlocal most
            one.push(VllmStep(0, time.monotonic(), time.time(), None, STEP))
            most = max(most, one.queued)

        def is_silent() -> bool:
            pushed()
            return silent.is_set()

        def is_reopened() -> bool:
            pushed()
            return not one.connected

        await until(lambda: one.connected)
        await until(is_silent)
        assert one.connected
        assert most < ANSWERING / PACE
        await until(is_reopened, timeout=3 * ACK_TIMEOUT)
        one.close(0.0)

    assert one.dropped == 0
