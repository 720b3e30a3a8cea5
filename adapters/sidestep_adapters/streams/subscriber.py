"""The sources of ``--subscribe``: the sockets of one subscription, for messages and replays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import zmq

from sidestep.config.settings import Config
from sidestep.errors import ConfigError, WireError
from sidestep.ingest.intake import Intake
from sidestep.ingest.local_stream import RankFeed
from sidestep.protocol.limits import MAX_FRAME_BYTES
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.peer_log import PeerLog
from sidestep.transport.client_socket import ConnectionMonitor
from sidestep_adapters.streams.frames import Frames, SharedContext, make_socket
from sidestep_adapters.streams.readers import LOST, READERS, Reader
from sidestep_adapters.streams.sequence import (
    CHECKSUM_MASK,
    MAX_SEQ,
    Accepted,
    Discontinuity,
    Position,
    Sequencer,
    Step,
)

log = logging.getLogger(__name__)

RECONNECT_AFTER = 10.0
"""Seconds without a connection after which a new socket is made: libzmq stops reconnecting after
some protocol errors of a peer.
"""
END_MARKER = b"\xff" * 8
LIVE_FRAMES = 3
_PREFIX = "sidestep_subscription_"


class Subscriber:
    """Reads one stream; implements ``sidestep.ingest.plugins.Source``."""

    def __init__(self, feed: RankFeed, reader: Reader, context: SharedContext) -> None:
        self.subscription = one = feed.subscription
        self._feed = feed
        self._reader = reader
        self._context = context
        position = Position(feed.seq, feed.mark[0] & CHECKSUM_MASK) if feed.mark else None
        self._sequencer = Sequencer(replays=bool(self.subscription.replay), position=position)
        self._counted = (0, 0, 0)
        """Counters of the sequencer as the metrics have them."""
        self._requests_sent = 0
        """Replay requests of the sequencer that were sent."""
        self._is_reconnected = False
        """True if messages of an earlier connection may still be in the socket."""
        self._connected_at = float("inf")
        """When the connection was last up, or the socket was last made again."""
        self._ipv6 = False
        """Engines that listen on tcp://*, as in their documents, do so over IPv4 only."""
        self._was_connected = False
        self._live: Frames | None = None
        self._monitor: ConnectionMonitor | None = None
        self._replay: Frames | None = None
        self._wake: Callable[[], None] = lambda: None
        self._lines = RateLimitedLog(log)
        self._peer_log = PeerLog(log, one.name, "the publisher")
        for name in ("messages", "replayed_messages", "lost_messages"):
            self._count(name, 0)
        self._update_counters()

    @property
    def connected(self) -> bool:
        """True while there is a connection to the publisher."""
        return self._monitor is not None and self._monitor.connected

    def open(self, wake: Callable[[], None]) -> None:
        """Connect; the publisher may start later."""
        self._wake = wake
        one = self.subscription
        socket = make_socket(self._context.acquire(), zmq.SUB, one.endpoint, ipv6=self._ipv6)
        self._monitor = ConnectionMonitor(socket, one.endpoint, "is it a stream of ZeroMQ?")
        self._live = Frames(socket)
        socket.setsockopt(zmq.SUBSCRIBE, one.topic.encode())
        try:
            socket.connect(one.endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot subscribe to {one.endpoint}: {error.strerror}") from None
        loop = asyncio.get_running_loop()
        for each in (socket, self._monitor.socket):
            loop.add_reader(each.fileno(), wake)

    def receive(self, now: float) -> bool:
        """Process at most one message; return whether there may be more."""
        self._read_monitor()
        if self._sequencer.replay_from is not None:
            return self._receive_replay(now)
        skipping = self._live is not None and self._live.skipping
        frames = None if self._live is None else self._live.receive()
        if frames is None:
            if not self._is_reconnected:
                return False
            self._is_reconnected = False
            self._sequencer.connected(now)
            self._send_replay_request()
            return self._sequencer.replay_from is not None
        if len(frames) != LIVE_FRAMES or len(frames[1]) != len(END_MARKER):
            # A message with too many frames is read a thousand frames at a time, and counted once.
            self._feed.reject("bad_frame", int(not skipping))
            return True
        self._process(frames[1], frames[2], now, self._sequencer.live)
        return True

    def tick(self, now: float) -> None:
        """Report the publisher as present, reconnect if necessary, and end a replay that takes too long."""
        if self._live is None:
            self.open(self._wake)
        self._read_monitor()
        self._connected_at = min(self._connected_at, now)
        if self.connected:
            self._connected_at, self._was_connected = now, True
            self._feed.mark_seen(now)
            self._peer_log.connected(now)
        elif now - self._connected_at >= RECONNECT_AFTER:
            self._connected_at = now
            self._ipv6 ^= not self._was_connected
            self.close()
            self.open(self._wake)
        if self._monitor is not None and not self.connected:
            self._peer_log.absent(now, self._monitor.problem)
        self._apply(self._sequencer.expire(now), now)

    async def wait_closed(self) -> None:
        """Return at once: ``close`` closes the sockets."""

    def close(self) -> None:
        """Disconnect, and discard everything that waits in the sockets."""
        self._close_replay()
        if self._live is None or self._monitor is None:
            return
        loop = asyncio.get_running_loop()
        for each in (self._live.socket, self._monitor.socket):
            loop.remove_reader(each.fileno())
        self._monitor.close()
        self._live.socket.close()
        self._live = self._monitor = None
        self._is_reconnected = False
        self._context.release()

    cut = close
    """``tick`` connects again."""

    def _read_monitor(self) -> None:
        for event in () if self._monitor is None else self._monitor.events():
            self._is_reconnected |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._sequencer.connection_lost |= event == zmq.EVENT_DISCONNECTED

    def _receive_replay(self, now: float) -> bool:
        frames = None if self._replay is None else self._replay.receive()
        if frames is None:
            return False
        number, payload = frames[-2:] if len(frames) > 1 else (b"", b"")
        if number == END_MARKER:
            self._apply(self._sequencer.replay_ended(now), now)
        elif len(number) != len(END_MARKER):
            self._feed.reject("bad_frame")
        else:
            self._process(number, payload, now, self._sequencer.replayed)
        return True

    def _process(
        self,
        number: bytes,
        payload: bytes,
        now: float,
        decide: Callable[[int, bytes, float], Iterable[Step]],
    ) -> None:
        seq = int.from_bytes(number, "big")
        if seq > MAX_SEQ:
            self._feed.reject("bad_frame")
        else:
            self._feed.mark_seen(now)
            self._apply(decide(seq, payload, now), now)

    def _apply(self, steps: Iterable[Step], now: float) -> None:
        """Queue the sequencer's decisions for ingest, then send a replay request if one is due."""
        for step in steps:
            position = self._sequencer.position
            if isinstance(step, Accepted) and position is not None:
                self._feed.enqueue(partial(self._deliver, step, position, now))
            elif isinstance(step, Discontinuity):
                self._feed.enqueue(partial(self._handle_discontinuity, step))
        self._update_counters()
        self._send_replay_request()

    def _deliver(self, message: Accepted, position: Position, now: float) -> None:
        self._count("messages", 1)
        self._count("replayed_messages", int(message.replayed))
        try:
            if len(message.payload) > MAX_FRAME_BYTES:
                self._reader.on_discontinuity(LOST)
                raise WireError("too_big")
            self._reader.accept(message.payload, now)
        finally:
            self._feed.record_position(position.seq, position.checksum, *self._reader.resume_values)

    def _handle_discontinuity(self, found: Discontinuity) -> None:
        self._count("lost_messages", found.lost)
        if found.restarted:
            text = "%s: the publisher has restarted"
            self._lines.info("restarted", text, self.subscription.name)
            for engine in self._feed.engines:
                engine.restarts += 1
        if found.lost:
            self._lines.warning(
                "lost", "%s: %d messages are lost", self.subscription.name, found.lost
            )
        self._reader.on_discontinuity(found)

    def _send_replay_request(self) -> None:
        """Send the sequencer's replay request, unless it was sent."""
        sequencer = self._sequencer
        if sequencer.replay_requests == self._requests_sent or sequencer.replay_from is None:
            return
        self._requests_sent = sequencer.replay_requests
        # A new socket: responses to an earlier request must not be taken for this one's.
        self._close_replay()
        replay = self.subscription.replay
        socket = make_socket(self._context.current, zmq.DEALER, replay, ipv6=self._ipv6)
        socket.connect(replay)
        self._replay = Frames(socket)
        asyncio.get_running_loop().add_reader(socket.fileno(), self._wake)
        socket.send_multipart([b"", sequencer.replay_from.to_bytes(8, "big")], zmq.NOBLOCK)

    def _close_replay(self) -> None:
        if self._replay is not None:
            asyncio.get_running_loop().remove_reader(self._replay.socket.fileno())
            self._replay.socket.close()
            self._replay = None

    def _update_counters(self) -> None:
        sequencer = self._sequencer
        counted = sequencer.gaps, sequencer.duplicates, sequencer.restarts
        names = ("gaps", "duplicate_messages", "restarts")
        for name, now, before in zip(names, counted, self._counted, strict=True):
            self._count(name, now - before)
        self._counted = counted

    def _count(self, name: str, more: int) -> None:
        self._feed.intake.metrics.add(f"{_PREFIX}{name}_total", more, self.subscription.name)


def sources(config: Config, intake: Intake, _: object) -> Sequence[Subscriber]:
    """Return one subscriber for each ``--subscribe``.

    Raises:
        ConfigError: The labels of a subscription cannot be an engine's.
    """
    context = SharedContext()
    subscribers: list[Subscriber] = []
    for subscription in config.subscribe:
        reader = READERS[subscription.kind]
        feed = RankFeed(intake, subscription, reader.feature)
        try:
            feed.check()
        except WireError as error:
            raise ConfigError(f"--subscribe {subscription.name}: {error}") from None
        subscribers.append(Subscriber(feed, reader(feed), context))
    intake.metrics.read(
        "sidestep_subscription_connected",
        lambda: [((each.subscription.name,), float(each.connected)) for each in subscribers],
    )
    return subscribers
