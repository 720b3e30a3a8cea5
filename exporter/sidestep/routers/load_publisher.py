"""Publication of the engines' load: a PUB socket for each data-parallel rank, as SGLang has them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from sidestep.errors import ConfigError
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.routers.load_message import encode, load_of, rank_of
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.socket_options import options_for

log = logging.getLogger(__name__)

RESEND_SECONDS = 1.0
"""Seconds after which the last load is sent again, as by SGLang; routers notice an engine that is silent."""
QUEUED = 8
"""Messages that wait for one subscriber; a slower one misses the rest, and gets a newer load."""
SUBSCRIPTION_BYTES = 1024
MAX_RANKS = 1024
MAX_PORT = 65535


class Publication:
    """The socket of one rank.

    Args:
        socket: A bound PUB socket.
        engine: Identity of the engine that has the rank.
    """

    def __init__(self, socket: zmq.Socket[bytes], engine: str) -> None:
        self.socket = socket
        self.engine = engine
        self.sequence = 0
        self.sent_at = 0.0


class LoadPublisher:
    """Publisher of the load of a registry's engines.

    The sockets belong to the event loop's thread; a PUB socket never blocks.

    Args:
        registry: The engines.
        metrics: Self-metrics.
        host: Host of the endpoints.
        port: Port of rank 0; rank N has ``port + N``.
        interval: Least seconds between two messages of an engine.
    """

    def __init__(
        self, registry: Registry, metrics: SelfMetrics, host: str, port: int, interval: float = 0.0
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._host = host
        self._port = port
        self._interval = interval
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._ranks: dict[int, Publication] = {}
        self._changed: dict[str, Engine] = {}
        self._is_scheduled = False
        self._published_at = float("-inf")
        self._log = RateLimitedLog(log)

    def open(self) -> None:
        """Bind the socket of rank 0, so that an address that cannot be used is noticed at the start.

        Raises:
            ConfigError: It is in use, or not one of this host.
        """
        self._context = zmq.Context()
        try:
            self._sockets[0] = self._bind(0)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--publish.load {self._endpoint(0)}: {error.strerror}") from None

    def close(self) -> None:
        """Close all sockets."""
        if self._context is not None:
            self._context.destroy(linger=0)

    def note(self, engine: Engine) -> None:
        """Publish the load of ``engine``, which an item has changed, once the event loop is free."""
        self._changed[engine.id] = engine
        if self._is_scheduled:
            return
        self._is_scheduled = True
        loop = asyncio.get_running_loop()
        pause = self._published_at + self._interval - loop.time()
        if pause > 0:
            loop.call_later(pause, self._publish_changed)
        else:
            loop.call_soon(self._publish_changed)

    async def run(self, is_stalled: Callable[[Engine], bool]) -> None:
        """Send the load of idle engines again until cancelled; nothing is sent of a stalled engine."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(RESEND_SECONDS / 2)
            due = loop.time() - RESEND_SECONDS / 2
            self._forget_gone()
            for publication in [*self._ranks.values()]:
                engine = self._registry.engines[publication.engine]
                if publication.sent_at <= due and engine.is_up and not is_stalled(engine):
                    self._publish(engine)

    def _publish_changed(self) -> None:
        self._is_scheduled = False
        self._published_at = asyncio.get_running_loop().time()
        changed, self._changed = self._changed, {}
        for engine in changed.values():
            self._publish(engine)

    def _publish(self, engine: Engine) -> None:
        rank = None if engine.federated else rank_of(engine)
        load = None if rank is None else load_of(engine, rank)
        if rank is None or load is None:
            return
        publication = self._ranks.get(rank) or self._add(rank, engine)
        if publication is None:
            return
        if publication.engine != engine.id:
            self._log.warning(
                f"rank {rank}",
                "--publish.load: the load of engine %r is not published, since %r has the rank %d, too:"
                " an exporter publishes the engines of one model",
                engine.id,
                publication.engine,
                rank,
            )
            return
        publication.sequence += 1
        publication.sent_at = asyncio.get_running_loop().time()
        publication.socket.send_multipart(encode(load, publication.sequence))
        self._metrics.add("sidestep_published_load_messages_total")

    def _add(self, rank: int, engine: Engine) -> Publication | None:
        """Return the new publication of a rank; None where its port cannot be had."""
        try:
            socket = self._sockets.get(rank) or self._bind(rank)
        except zmq.ZMQError as error:
            self._log.warning(
                f"port {rank}",
                "--publish.load: the load of rank %d cannot be published at %s: %s",
                rank,
                self._endpoint(rank),
                error.strerror,
            )
            return None
        self._sockets[rank] = socket
        self._ranks[rank] = found = Publication(socket, engine.id)
        return found

    def _forget_gone(self) -> None:
        """Free the ranks of engines that are no longer exposed; their sockets stay bound."""
        for rank, publication in [*self._ranks.items()]:
            if publication.engine not in self._registry.engines:
                del self._ranks[rank]

    def _bind(self, rank: int) -> zmq.Socket[bytes]:
        if rank >= MAX_RANKS or self._port + rank > MAX_PORT:
            raise zmq.ZMQError(zmq.EINVAL, "there is no such port")
        assert self._context is not None
        socket = self._context.socket(zmq.PUB)
        for option, value in options_for(SUBSCRIPTION_BYTES):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.SNDHWM, QUEUED)
        socket.setsockopt(zmq.IPV6, ":" in self._host)
        try:
            socket.bind(self._endpoint(rank))
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _endpoint(self, rank: int) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host or "*"
        return f"tcp://{host}:{self._port + rank}"
