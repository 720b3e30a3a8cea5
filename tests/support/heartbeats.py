"""An exporter's end of a connection that keeps the heartbeats it receives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, final

import zmq

from sidestep.protocol.messages import Heartbeat, decode_from_sender, encode
from sidestep.protocol.progress import Progress
from sidestep.protocol.receiver import Receiver


class Beat(NamedTuple):
    """A heartbeat, and when it arrived."""

    at: float
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()
        self._context.term()

    @property
    def progress(self) -> list[Progress]:
        """Return the progress of the stream's first engine, by heartbeat."""
        return [beat.heartbeat.progress[0] for beat in self.beats if beat.heartbeat.progress]

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
                if isinstance(message, Heartbeat):
                    self.beats.append(Beat(time.monotonic(), message))
                received = receiver.receive(peer, message, time.monotonic(), len(frame))
                replies += received.replies
            for to, reply in replies:
                self._socket.send_multipart([to, encode(reply)])
