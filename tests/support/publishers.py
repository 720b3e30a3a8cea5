"""A publisher of an engine's stream as engines have it, that drops, repeats, restarts and lies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import final

import zmq

END = b"\xff" * 8


@final
class Publisher:
    """A PUB socket, and a ROUTER that answers with what was said; use it as a context.

    Attributes:
        kept: How many of the last messages can be asked for.
        asked: From which numbers on somebody has asked.
    """

    def __init__(self, endpoint: str, replay: str = "", *, kept: int = 10_000) -> None:
        self.endpoint, self.replay, self.kept = endpoint, replay, kept
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.socket.close()
        self._context.term()

    @property
    def subscribed(self) -> bool:
        """Whether somebody listens, who was not there before."""
        return bool(self.socket.poll(0)) and self.socket.recv() == b"\x01"

    def say(self, payload: bytes, *, seq: int | None = None, copies: int = 1) -> None:
        """A message; with no copies it is lost on the way, but can be asked for."""
        number = len(self._said) if seq is None else seq
        # An engine answers between two messages, never between a message and keeping it.
        self._said.append((number, payload))
        for _ in range(copies):
            self.send(b"kv", number.to_bytes(8, "big"), payload)

    def send(self, *frames: bytes) -> None:
        """Anything."""
        self.socket.send_multipart(frames)

    def restart(self) -> None:
        """Be another process."""
        self.__exit__(None, None, None)
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
