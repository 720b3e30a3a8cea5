"""Hostile peers with a valid CURVE key, by libzmq: an engine and an exporter that flood."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from sidestep.errors import WireError
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import Ack, Hello, decode_from_sender, encode
from sidestep.transport import keys
from sidestep.transport.keys import CLIENT_KEY, SERVER_KEY

LONG_ENOUGH = 0.2
"""Seconds until a relay has passed on the bytes after which it resets."""


class KeyFiles:
    """Keys of an exporter and of one authorized engine, as files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.exporter, self.exporter_public = keys.generate(folder, "exporter")
        self.authorized = folder / "authorized"
        self.authorized.mkdir()
        self.engine, public = keys.generate(folder, "engine")
        public.rename(self.authorized / public.name)

    @property
    def flags(self) -> list[str]:
        """Flags of the exporter."""
        return [
            "--ingest.curve-key",
            str(self.exporter),
            "--ingest.authorized-keys",
            str(self.authorized),
        ]

    @property
    def environ(self) -> dict[str, str]:
        """Environment of the engine."""
        return {SERVER_KEY: str(self.exporter_public), CLIENT_KEY: str(self.engine)}


def flood_exporter(endpoint: str, files: KeyFiles, connections: int) -> None:
    """Connect again and again with a valid key, send tiny messages and heartbeats; the relay resets."""
    secret = keys.read_secret(files.engine)
    for number in range(connections):
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.setsockopt(zmq.HEARTBEAT_IVL, 1)
            peer.setsockopt(zmq.RECONNECT_IVL, -1)
            peer.curve_publickey, peer.curve_secretkey = keys.public_of(secret), secret
            peer.curve_serverkey = keys.read_public(files.exporter_public).text.encode()
            peer.connect(endpoint)
            until = time.monotonic() + LONG_ENOUGH
            while time.monotonic() < until:
                with contextlib.suppress(zmq.Again):
                    for _ in range(1000):
                        if number % 3:
                            peer.send(b"xyz", zmq.NOBLOCK)
                        else:
                            peer.send_multipart([b"x"] * 50, zmq.NOBLOCK)
                time.sleep(0.005)


@contextlib.contextmanager
def flooding_exporter(files: KeyFiles) -> Iterator[tuple[str, int]]:
    """Run an exporter that answers a Hello over its key, and then sends without end.

    Yields:
        Host and port.
    """
    stop = threading.Event()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.setsockopt(zmq.HEARTBEAT_IVL, 1)
    router.setsockopt(zmq.SNDHWM, 0)
    router.curve_server = True
    router.curve_secretkey = keys.read_secret(files.exporter)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    thread = threading.Thread(target=_serve, args=(router, stop))
    thread.start()
    try:
        yield "127.0.0.1", port
    finally:
        stop.set()
        thread.join()
        context.term()


def _serve(router: zmq.Socket[bytes], stop: threading.Event) -> None:
    number = 0
    while not stop.is_set():
        if not router.poll(50):
            continue
        peer, *frames = router.recv_multipart()
        try:
            hello = decode_from_sender(frames[0])
        except WireError:
            continue
        if not isinstance(hello, Hello):
            continue
        number += 1
        ack = Ack(VERSION, number, hello.incarnation, hello.nonce, 0, 0)
        router.send_multipart([peer, encode(ack)])
        ack.nonce = None
        if number % 2:
            for _ in range(20_000):
                router.send_multipart([peer, encode(ack)])
        else:
            router.send_multipart([peer, *[bytes(60_000)] * 1000])
    router.close()
