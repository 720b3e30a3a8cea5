"""A TCP relay that passes some bytes on, and then resets both sides."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator

from fuzz import zmtp_peer as zmtp


class Relay:
    """TCP relay to ``target``.

    Args:
        target: Host and port.
        size: Bytes, in both directions, after which a connection is reset.

    Attributes:
        resets: Connections that were reset.
    """

    def __init__(self, target: tuple[str, int], size: int) -> None:
        self.resets = 0
        self._target = target
        self._size = size
        self._door = zmtp.listen(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._run)]
        self._stopped = threading.Event()
        self._threads[0].start()

    @property
    def endpoint(self) -> str:
        """Endpoint to connect to instead of the target."""
        return f"tcp://127.0.0.1:{self._door.getsockname()[1]}"

    def close(self) -> None:
        """Stop, and reset all connections."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._pass, args=(near,))
            self._threads.append(thread)
            thread.start()

    def _pass(self, near: socket.socket) -> None:
        far: socket.socket | None = None
        with contextlib.suppress(OSError):
            far = zmtp.dial(self._target)
            left = self._size
            while left > 0 and not self._stopped.is_set():
                readable, _, _ = select.select([near, far], [], [], 0.1)
                for one in readable:
                    data = one.recv(min(left, 1 << 16)) or zmtp.closed()
                    (far if one is near else near).sendall(data)
                    left -= len(data)
            self.resets += 1
        for end in filter(None, (near, far)):
            zmtp.reset(end)


@contextlib.contextmanager
def resetting(target: tuple[str, int], size: int) -> Iterator[Relay]:
    """Run a relay, and close it at the end."""
    made = Relay(target, size)
    try:
        yield made
    finally:
        made.close()
