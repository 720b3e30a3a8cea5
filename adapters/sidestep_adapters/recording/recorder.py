"""``sidestep record``: takes the place of an exporter and records what engines send.

With an exporter behind it, frames pass through unchanged in both directions, so that delivery
stays between the engine and the exporter. Without one, the recorder acknowledges them itself.
"""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import Any

import zmq

from sidestep.errors import RunError, WireError
from sidestep.protocol.messages import FromExporter, decode_from_sender, encode
from sidestep.protocol.receiver import Received, Receiver
from sidestep.transport.access import Access
from sidestep.transport.client_socket import dealer
from sidestep.transport.keys import keys_for
from sidestep.transport.listener import IngestListener
from sidestep_adapters.recording.format import Items, StreamStart, Writer

POLL_MS = 50
Socket = zmq.Socket[bytes]


class Tee:
    """A listening socket, a recording, and a connection to the exporter for each engine.

    Args:
        upstream: The exporter's endpoint; empty without one.
        path: The recording; an existing file is replaced.
    """

    def __init__(
        self,
        endpoint: str,
        upstream: str,
        path: Path,
        access: Access = Access(),  # noqa: B008 - frozen
    ) -> None:
        self.items = 0
        self._upstream = upstream
        self._peers: dict[str, bytes] = {}
        self._receiver = Receiver(secrets.randbits(63))
        self._started = time.monotonic()
        self._context = zmq.Context()
        self._upstream_sockets: dict[bytes, Socket] = {}
        self._keys = keys_for(upstream)
        self._listener = IngestListener([endpoint], access)
        engine_socket = self._listener.socket
        assert engine_socket is not None
        self._engine_socket: Socket = engine_socket
        self._poller = zmq.Poller()
        self._poller.register(self._engine_socket, zmq.POLLIN)
        if self._listener.zap is not None:
            self._poller.register(self._listener.zap.socket, zmq.POLLIN)
        try:
            # Opened last: an unusable endpoint must not truncate an existing recording.
            self._writer = Writer(path)
        except Exception:
            self._listener.close(0)
            self._context.term()
            raise

    def run(self, stop: threading.Event) -> None:
        """Record until ``stop`` is set."""
        try:
            while not stop.is_set():
                for socket, _ in self._poller.poll(POLL_MS):
                    if self._listener.zap is not None and socket is self._listener.zap.socket:
                        self._listener.authenticate()
                    elif not socket.closed:
                        self._read(socket)
                if not self._upstream:
                    self._reply(self._receiver.acks(time.monotonic()))
        except (OSError, zmq.ZMQError) as error:
            raise RunError(f"recording failed: {error.strerror}") from None
        finally:
            for upstream in self._upstream_sockets.values():
                upstream.close(linger=200)
            self._context.term()
            self._listener.close(linger=200)
            self._writer.close()

    def _read(self, socket: Any) -> None:
        for _ in range(100):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if socket is self._engine_socket:
                self._from_engine(frames)
            else:
                peer = next(
                    (p for p, upstream in self._upstream_sockets.items() if upstream is socket), b""
                )
                self._send(self._engine_socket, [peer, *frames])

    def _from_engine(self, frames: list[bytes]) -> None:
        peer, *payload = frames
        try:
            frame = payload[0] if payload else b""
            message = decode_from_sender(frame)
            received = self._receiver.receive(peer, message, time.monotonic(), len(frame))
            self._record(received)
            replies = received.replies
        except WireError as error:
            replies = self._receiver.refuse_frame(peer, error)
        if self._upstream:
            self._send(self._upstream_socket(peer), payload)
        else:
            self._reply(replies)

    def _record(self, received: Received) -> None:
        stream = received.stream
        if stream is None:
            return
        at = time.monotonic() - self._started
        if received.opened:
            before = self._peers.get(stream.id, stream.peer)
            self._peers[stream.id] = stream.peer
            if before != stream.peer and before in self._upstream_sockets:
                # The engine has reconnected; its old connection is unused.
                gone = self._upstream_sockets.pop(before)
                self._poller.unregister(gone)
                gone.close(linger=0)
            self._writer.write(StreamStart(at, stream.id, stream.engines))
        if received.items:
            self.items += len(received.items)
            self._writer.write(Items(at, stream.id, list(received.items)))

    def _upstream_socket(self, peer: bytes) -> Socket:
        upstream = self._upstream_sockets.get(peer)
        if upstream is None:
            upstream = self._upstream_sockets[peer] = dealer(self._context, self._keys)
            upstream.connect(self._upstream)
            self._poller.register(upstream, zmq.POLLIN)
        return upstream

    def _reply(self, replies: list[tuple[bytes, FromExporter]]) -> None:
        for peer, message in replies:
            self._send(self._engine_socket, [peer, encode(message)])

    def _send(self, socket: Socket, frames: list[bytes]) -> None:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            # The frame is lost, as on any lossy link; the protocol retransmits it.
            return
