"""Filter on aiohttp's log lines: a bad request is the peer's fault and gets no traceback."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError

from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics

log = logging.getLogger(__name__)


class _AiohttpFilter(logging.Filter):
    """Replaces aiohttp's lines by rate-limited ones, which are short unless it is a bug."""

    def __init__(self, metrics: SelfMetrics) -> None:
        super().__init__()
        self._metrics = metrics
        self._limited = RateLimitedLog(log)

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            self._metrics.add("sidestep_http_refused_total", 1, "bad_request")
            # The message contains bytes of the peer, and several lines.
            what = type(error).__name__
            self._limited.warning("bad_request", "%s: %s", record.getMessage(), what)
        elif record.levelno >= logging.WARNING:
            self._limited.error("bug", "%s", record.getMessage(), trace=error)
        return False


def aiohttp_logger(metrics: SelfMetrics) -> logging.Logger:
    """Return a logger for aiohttp's server."""
    logger = logging.Logger("sidestep.http.aiohttp", logging.DEBUG)  # noqa: LOG001 - one per server
    logger.addFilter(_AiohttpFilter(metrics))
    return logger
