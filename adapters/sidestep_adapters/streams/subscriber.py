"""One publisher's sockets on the event loop: what is published, and what was missed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

import zmq
from zmq.utils.monitor import recv_monitor_message

from sidestep.errors import ConfigError, WireError
from sidestep.ingest.local_stream import RankFeed
from sidestep.protocol.limits import MAX_FRAME_BYTES
from sidestep.telemetry.logs import RateLimitedLog
from sidestep_adapters.streams.frames import Frames, Socket, make
from sidestep_adapters.streams.readers import LOST, Reader
from sidestep_adapters.streams.sequence import (
    CHECKSUM,
    LAST,
    Break,
    Message,
    Position,
    Sequence,
    Step,
)

log = logging.getLogger(__name__)

ABSENT = 10.0
"""Seconds without a connection after which the socket is made anew: libzmq tries no more to connect to
a peer that has said what cannot be."""
END = b"\xff" * 8
LIVE_FRAMES = 3
WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_PREFIX = "sidestep_subscription_"


class Subscriber:
    """Reads one stream, in the place of a ``sources.Source``.

    Args:
        context: Whose sockets it opens.
        released: Called when it has closed them.

    Attributes:
        connected: Whether there is a connection to the publisher.
    """

    def __init__(
        self,
        feed: RankFeed,
        reader: Reader,
        context: zmq.Context[Socket],
        released: Callable[[], None] = lambda: None,
    ) -> None:
        self.connected = False
        self.subscription = feed.subscription
        self._feed = feed
        self._reader = reader
        self._context = context
        self._released = released
        position = Position(feed.seq, feed.mark[0] & CHECKSUM) if feed.mark else None
        self._sequence = Sequence(replays=bool(self.subscription.replay), position=position)
        self._counted = (0, 0, 0)
        self._requested = 0
        self._is_new = False
        self._present = float("inf")
        """When there was a connection, or it was last waited for anew."""
        self._live: Frames | None = None
        self._monitor: Socket | None = None
        self._replay: Frames | None = None
        self._wake: Callable[[], None] = lambda: None
        self._lines = RateLimitedLog(log)
        for name in ("messages", "replayed_messages", "lost_messages"):
            self._count(name, 0)
        self._note()

    def open(self, wake: Callable[[], None]) -> None:
        """Connect; the publisher may come later.

        Raises:
            ConfigError: The endpoint is none.
        """
        self._wake = wake
        one = self.subscription
        socket = make(self._context, zmq.SUB)
        # Before there can be anything to watch.
        self._monitor = socket.get_monitor_socket(WATCHED)
        self._live = Frames(socket)
        socket.setsockopt(zmq.SUBSCRIBE, one.topic.encode())
        try:
            socket.connect(one.endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot subscribe to {one.endpoint}: {error.strerror}") from None
        loop = asyncio.get_running_loop()
        for each in (socket, self._monitor):
            loop.add_reader(each.fileno(), wake)

    def receive(self, now: float) -> bool:
        """Hand over one message at most; whether there may be more."""
        self._look()
        if self._sequence.asked is not None:
            return self._hear_answer(now)
        skipping = self._live is not None and self._live.skipping
        frames = None if self._live is None else self._live.receive()
        if frames is None:
            if not self._is_new:
                return False
            self._is_new = False
            self._sequence.connected(now)
            self._request()
            return self._sequence.asked is not None
        if len(frames) != LIVE_FRAMES or len(frames[1]) != len(END):
            # Of a message with too many frames each thousand is read by itself.
            self._feed.intake.reject("bad_frame", int(not skipping))
            return True
        self._hear(frames[1], frames[2], now, self._sequence.live)
        return True

    def pass_time(self, now: float) -> None:
        """Say that the publisher is there; wait no longer for an answer than one has to."""
        self._look()
        self._present = min(self._present, now)
        if self.connected:
            self._present = now
            self._feed.heard(now)
        elif now - self._present >= ABSENT:
            self._present = now
            self.cut()
        self._follow(self._sequence.pass_time(now), now)

    def cut(self) -> None:
        """Let go of all that waits in the sockets."""
        self._disconnect()
        self.open(self._wake)

    def close(self) -> None:
        """Disconnect."""
        self._disconnect()
        self._released()

    async def wait_closed(self) -> None:
        """Its sockets end at once."""

    def _disconnect(self) -> None:
        self._drop_replay()
        self.connected = False
        if self._live is None or self._monitor is None:
            return
        loop = asyncio.get_running_loop()
        for each in (self._live.socket, self._monitor):
            loop.remove_reader(each.fileno())
        self._live.socket.disable_monitor()
        self._monitor.close()
        self._live.socket.close()
        self._live = self._monitor = None

    def _look(self) -> None:
        """What has become of the connection."""
        while self._monitor is not None:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._is_new |= self.connected
            self._sequence.doubtful |= not self.connected

    def _hear_answer(self, now: float) -> bool:
        frames = None if self._replay is None else self._replay.receive()
        if frames is None:
            return False
        *_, number, payload = (b"", *frames) if frames else (b"", b"")
        if number == END:
            self._follow(self._sequence.ended(now), now)
        elif len(number) != len(END):
            self._feed.intake.reject("bad_frame")
        else:
            self._hear(number, payload, now, self._sequence.replayed)
        return True

    def _hear(
        self,
        number: bytes,
        payload: bytes,
        now: float,
        decide: Callable[[int, bytes, float], Iterable[Step]],
    ) -> None:
        seq = int.from_bytes(number, "big")
        if seq > LAST:
            self._feed.intake.reject("bad_frame")
        else:
            self._feed.heard(now)
            self._follow(decide(seq, payload, now), now)

    def _follow(self, steps: Iterable[Step], now: float) -> None:
        """Let what was decided have its turn, then ask for what is missing."""
        for step in steps:
            position = self._sequence.position
            if isinstance(step, Message) and position is not None:
                self._feed.intake.enqueue(partial(self._take, step, position, now))
            elif isinstance(step, Break):
                self._feed.intake.enqueue(partial(self._break, step))
        self._note()
        self._request()

    def _take(self, message: Message, position: Position, now: float) -> None:
        self._count("messages", 1)
        self._count("replayed_messages", int(message.replayed))
        try:
            if len(message.payload) > MAX_FRAME_BYTES:
                self._reader.broke(LOST)
                raise WireError("too_big")
            self._reader.take(message.payload, now)
        finally:
            self._feed.took(position.seq, position.checksum, *self._reader.mark)

    def _break(self, found: Break) -> None:
        self._count("lost_messages", found.lost)
        if found.restarted:
            log.info("%s: the publisher has begun anew", self.subscription.name)
            for engine in self._feed.engines:
                engine.restarts += 1
        if found.lost:
            self._lines.warning(
                "lost", "%s: %d messages are lost", self.subscription.name, found.lost
            )
        self._reader.broke(found)

    def _request(self) -> None:
        """Ask, where something is to be asked for that was not yet."""
        sequence = self._sequence
        if sequence.requests == self._requested or sequence.asked is None:
            return
        self._requested = sequence.requests
        # Answers to an earlier question must not be taken for this one's.
        self._drop_replay()
        socket = make(self._context, zmq.DEALER)
        socket.connect(self.subscription.replay)
        self._replay = Frames(socket)
        asyncio.get_running_loop().add_reader(socket.fileno(), self._wake)
        socket.send_multipart([b"", sequence.asked.to_bytes(8, "big")], zmq.NOBLOCK)

    def _drop_replay(self) -> None:
        if self._replay is not None:
            asyncio.get_running_loop().remove_reader(self._replay.socket.fileno())
            self._replay.socket.close()
            self._replay = None

    def _note(self) -> None:
        """Count what the sequence has counted."""
        sequence = self._sequence
        counted = sequence.gaps, sequence.duplicates, sequence.restarts
        names = ("gaps", "duplicate_messages", "restarts")
        for name, now, then in zip(names, counted, self._counted, strict=True):
            self._count(name, now - then)
        self._counted = counted

    def _count(self, name: str, more: int) -> None:
        self._feed.intake.metrics.add(f"{_PREFIX}{name}_total", more, self.subscription.name)
