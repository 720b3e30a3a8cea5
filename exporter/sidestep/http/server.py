"""The HTTP server: configuration, guard and listener around an application."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Collection, Iterable
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from sidestep.http.connection import Limits
from sidestep.http.current_config import ActiveConfig, CurrentConfig
from sidestep.http.listener import HttpListener
from sidestep.http.request_guard import RequestGuard
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics

log = logging.getLogger(__name__)


class _AiohttpLogger(logging.Logger):
    """Replaces aiohttp's log lines by rate-limited ones; only a bug has a traceback."""

    def __init__(self, metrics: SelfMetrics) -> None:
        super().__init__("sidestep.http.aiohttp", logging.DEBUG)
        self._metrics = metrics
        self._limited = RateLimitedLog(log)

    def handle(self, record: logging.LogRecord) -> None:
        """Log a line about a client or a bug; aiohttp's other lines say nothing of use."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            self._metrics.add("sidestep_http_refused_total", 1, "bad_request")
            # The message contains bytes of the peer, and several lines.
            what = type(error).__name__
            self._limited.warning("bad_request", "%s: %s", record.getMessage(), what)
        elif record.levelno >= logging.WARNING:
            self._limited.error("bug", "%s", record.getMessage(), trace=error)


REFUSED = ("bad_request", "connections", "handshake", "host", "overload", "slow")
"""Reasons of ``sidestep_http_refused_total``."""


class HttpServer:
    """Serves an application to clients that the web configuration admits.

    Args:
        allowed_hosts: Names that a request over loopback may have besides the usual ones.
    """

    def __init__(
        self,
        config_file: str,
        metrics: SelfMetrics,
        limits: Limits | None = None,
        allowed_hosts: Collection[str] = (),
    ) -> None:
        self._metrics = metrics
        self._limits = limits or Limits()
        path = Path(config_file) if config_file else None
        self.current = CurrentConfig(path, metrics, self._changed)
        self._listener: HttpListener | None = None
        self._guard = RequestGuard(self.current.active.config, metrics, self._limits, allowed_hosts)
        metrics.set("sidestep_http_connections", 0)
        for reason in REFUSED:
            metrics.add("sidestep_http_refused_total", 0, reason)

    @property
    def scheme(self) -> str:
        """Return ``https`` with TLS, else ``http``."""
        return "https" if self.current.active.context is not None else "http"

    @contextlib.asynccontextmanager
    async def serving(
        self, app: web.Application, sockets: Iterable[socket.socket]
    ) -> AsyncIterator[None]:
        """Serve until the block ends, then finish requests in flight; closes the sockets."""
        self._guard.attach(app)
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=5.0,
            logger=_AiohttpLogger(self._metrics),
            keepalive_timeout=self._limits.idle_seconds,
            lingering_time=1.0,
        )
        await runner.setup()
        assert runner.server is not None
        listener = HttpListener(runner.server, self.current, self._metrics, self._limits)
        self._listener = listener
        listener.start(sockets)
        try:
            yield
        finally:
            await listener.stop()
            await runner.cleanup()
            await listener.abort()
            self._guard.close()

    def _changed(self, before: ActiveConfig, after: ActiveConfig) -> None:
        self._guard.apply(after.config)
        # Clients that other authorities or names admitted must connect again.
        if self._listener is not None and before.client_trust != after.client_trust:
            self._listener.drop_all()
