"""Listener: accepts a bounded number of connections with the active TLS, and enforces deadlines."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any

from sidestep.errors import ConfigError
from sidestep.http.connection import Connection, Limits
from sidestep.http.current_config import CurrentConfig
from sidestep.http.tls import subject_names
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics

log = logging.getLogger(__name__)

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_CERTIFICATE = "PEER_DID_NOT_RETURN_A_CERTIFICATE"


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; an empty host is all addresses."""
    shown = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # One socket for all addresses of both families if the host has IPv6.
        found.sort(key=lambda entry: entry[0] == socket.AF_INET6, reverse=not host)
        family, _, _, _, address = found[0]
        dual = family == socket.AF_INET6 and not host
        return socket.create_server(
            address[:2], family=family, backlog=128, dualstack_ipv6=dual and socket.has_ipv6
        )
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} is in use at {host or 'all addresses'}: choose another with"
                " --web.listen-address or SIDESTEP_WEB_LISTEN_ADDRESS"
            ) from None
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {shown}: {reason}") from None


class HttpListener:
    """Connections of all listening sockets."""

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        current: CurrentConfig,
        metrics: SelfMetrics,
        limits: Limits,
    ) -> None:
        self._make = make
        self._current = current
        self._metrics = metrics
        self._limits = limits
        self._limited = RateLimitedLog(log)
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        # In order of arrival, the oldest first.
        self._open: dict[Connection, asyncio.Task[None]] = {}
        metrics.read("sidestep_http_connections", lambda: [((), len(self._open))])

    def start(self, sockets: Iterable[socket.socket]) -> None:
        """Accept connections; ``stop`` closes the sockets."""
        loop = asyncio.get_running_loop()
        self._sockets = list(sockets)
        for bound in self._sockets:
            bound.setblocking(False)
            self._tasks.append(loop.create_task(self._accept(bound)))
        self._tasks.append(loop.create_task(self._watch()))
        for task in self._tasks:
            # A bug in one of these ends the process, as in any other part.
            task.add_done_callback(lambda task: None if task.cancelled() else task.result())

    async def stop(self) -> None:
        """Stop accepting; handshakes and requests in flight continue.

        A handshake that is cancelled when it ends leaves a transport that uvloop has closed and that does
        not say so: writing the response to a request would raise an error of no known kind.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for bound in self._sockets:
            bound.close()

    async def abort(self) -> None:
        """Abort every connection, and wait until all are closed."""
        tasks = list(self._open.values())
        self.drop_all()
        await asyncio.gather(*tasks, return_exceptions=True)

    def drop_all(self) -> None:
        """Abort every connection without waiting: the rules that admitted it no longer apply."""
        for connection in list(self._open):
            self._drop(connection)

    async def _accept(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(bound)
            except OSError as error:
                # Usually the peer has disconnected. If descriptors have run out, the kernel keeps
                # it waiting, and accepting again at once would spin.
                exhausted = error.errno in _EXHAUSTED
                if exhausted:
                    self._limited.error("exhausted", "cannot accept: %s", error.strerror)
                await asyncio.sleep(self._limits.check_interval if exhausted else 0)
                continue
            if self._has_capacity():
                self._start_connection(accepted, address)
            else:
                accepted.close()
            await asyncio.sleep(0)  # a flood must not keep the loop here

    def _has_capacity(self) -> bool:
        """Return whether one more fits; if not, drop one that has never sent a request."""
        if len(self._open) < self._limits.connections:
            return True
        self._refused("connections", "over %d connections", self._limits.connections)
        spared = (
            asyncio.get_running_loop().time()
            + self._limits.request_seconds
            - self._limits.check_interval
        )
        for connection in self._open:
            if not connection.has_sent_request and connection.deadline < spared:
                self._drop(connection)
                del self._open[connection]
                return True
        return False

    def _start_connection(self, accepted: socket.socket, address: Any) -> None:
        peer = str(address[0])
        connection = Connection(self._make, lambda tls: self._admit(tls, peer), self._limits, peer)
        task = asyncio.get_running_loop().create_task(self._serve(accepted, connection))
        self._open[connection] = task
        task.add_done_callback(lambda task: self._closed(connection, task))

    def _closed(self, connection: Connection, task: asyncio.Task[None]) -> None:
        self._open.pop(connection, None)
        if not task.cancelled():
            task.result()

    async def _serve(self, accepted: socket.socket, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        try:
            context = self._current.active.context
            await loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=context,
                # Later than the deadline, which also logs it.
                ssl_handshake_timeout=2 * self._limits.request_seconds if context else None,
            )
        except (OSError, asyncio.TimeoutError) as error:
            self._handshake_failed(error, connection.peer)
            return
        finally:
            if connection.transport is None:
                accepted.close()
        await connection.closed

    def _handshake_failed(self, error: Exception, peer: str) -> None:
        """Count a failed handshake: by the client's certificate, or any other reason."""
        reason = getattr(error, "reason", None) or "no handshake"
        if isinstance(error, ssl.SSLCertVerificationError) or reason == _NO_CERTIFICATE:
            self._metrics.add("sidestep_auth_denied_total", 1, "client_cert")
            why = getattr(error, "verify_message", "") or "it sent none"
            self._limited.warning("client_cert", "rejected %s's certificate: %s", peer, why)
        elif not isinstance(error, ConnectionError):
            self._refused("handshake", "%s: %s", peer, reason)

    def _admit(self, tls: ssl.SSLObject | None, peer: str) -> bool:
        config = self._current.active.config.tls
        if tls is None or config is None or config.allowed_sans is None:
            return True
        if subject_names(tls) & config.allowed_sans:
            return True
        self._metrics.add("sidestep_auth_denied_total", 1, "client_cert")
        self._limited.warning(
            "client_san", "rejected %s's certificate: no name in client_allowed_sans", peer
        )
        return False

    async def _watch(self) -> None:
        """Drop overdue connections and reload the configuration, at every check interval."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._limits.check_interval)
            now = loop.time()
            for connection in list(self._open):
                if connection.is_overdue(now):
                    if connection.transport is None or not connection.transport.is_closing():
                        self._refused("slow", "%s took too long", connection.peer)
                    self._drop(connection)
            await self._current.refresh()

    def _drop(self, connection: Connection) -> None:
        if connection.transport is not None:
            connection.transport.abort()
        elif connection in self._open:
            self._open[connection].cancel()

    def _refused(self, reason: str, message: str, *arguments: object) -> None:
        self._metrics.add("sidestep_http_refused_total", 1, reason)
        self._limited.warning(reason, f"closed a connection: {message}", *arguments)
