"""A fake of the ZeroMQ publishers in engines, which can drop, repeat and renumber messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

import zmq

END = b"\xff" * 8


@final
class Publisher:
    """An XPUB socket, and a ROUTER that replays past messages; a context manager."""

    def __init__(self, endpoint: str, replay: str = "") -> None:
        self.endpoint, self.replay, self.kept = endpoint, replay, 10_000
        self.asked: list[int] = []
        self._said: list[tuple[int, bytes]] = []

    def __enter__(self) -> Publisher:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.XPUB)
        self.socket.linger = 0
        self.socket.bind(self.endpoint)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.socket.close()
        self._context.term()

    @property
    def subscribed(self) -> bool:
        """True if a subscription has arrived since this was last read."""
        return bool(self.socket.poll(0)) and self.socket.recv() == b"\x01"

    def publish(self, payload: bytes, *, seq: int | None = None, copies: int = 1) -> None:
        """Publish a message; with 0 copies it is lost, but can be replayed."""
        number = len(self._said) if seq is None else seq
        # An engine replays between two messages, never before it has stored one that it sent.
        self._said.append((number, payload))
        for _ in range(copies):
            self.send(b"kv", number.to_bytes(8, "big"), payload)

    def send(self, *frames: bytes) -> None:
        """Publish any frames."""
        self.socket.send_multipart(frames)

    def restart(self) -> None:
        """Start again as another process, without past messages."""
        self.__exit__()
        self._said = []
        self.__enter__()

    def _serve(self) -> None:
        if not self.replay:
            return
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.bind(self.replay)
        while not self._stop.is_set():
            if socket.poll(10):
                self._answer(socket.recv_multipart(), socket.send_multipart)
        socket.close()

    def _answer(self, request: list[bytes], send: Callable[[list[bytes]], object]) -> None:
        peer, delimiter, start = request
        first = int.from_bytes(start, "big")
        for seq, payload in self._said[-self.kept :]:
            if seq >= first:
                send([peer, delimiter, b"kv", seq.to_bytes(8, "big"), payload])
        send([peer, delimiter, b"", END, b""])
        self.asked.append(first)
