"""An exporter's end of a connection that keeps the heartbeats it receives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, final

import zmq

from sidestep.protocol.messages import Heartbeat, decode_from_sender, encode
from sidestep.protocol.progress import Progress
from sidestep.protocol.receiver import Receiver


class Beat(NamedTuple):
    """A heartbeat, when it arrived, and of which stream it is."""

    at: float
    stream: str
    heartbeat: Heartbeat


@final
class Heartbeats:
    """A socket with the exporter's own receiver behind it; a context manager."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.beats: list[Beat] = []

    def __enter__(self) -> Heartbeats:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(self.endpoint)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()
        self._context.term()

    @property
    def progress(self) -> list[Progress]:
        """Return the progress of the stream's first engine, by heartbeat."""
        return [beat.heartbeat.progress[0] for beat in self.beats if beat.heartbeat.progress]

    def last(self, stream: str) -> Progress | None:
        """Return the last progress of the stream whose name ends so; None if there is none."""
        for beat in reversed(self.beats):
            if beat.stream.endswith(stream) and beat.heartbeat.progress:
                return beat.heartbeat.progress[0]
        return None

    def wait(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait until ``condition`` holds.

        Raises:
            AssertionError: It does not hold within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.progress[-3:]
            self._stop.wait(0.005)

    def _serve(self) -> None:
        receiver = Receiver(1)
        while not self._stop.is_set():
            replies = [*receiver.acks(time.monotonic())]
            if self._socket.poll(10):
                peer, frame = self._socket.recv_multipart()
                message = decode_from_sender(frame)
                received = receiver.receive(peer, message, time.monotonic(), len(frame))
                if isinstance(message, Heartbeat) and received.stream is not None:
                    self.beats.append(Beat(time.monotonic(), received.stream.id, message))
                replies += received.replies
            for to, reply in replies:
                self._socket.send_multipart([to, encode(reply)])
