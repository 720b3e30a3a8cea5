"""Log lines of the process on standard error, as text or JSON."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

import msgspec

from sidestep.protocol.limits import escape

Fields = Mapping[str, object]

PACKAGES = ("sidestep", "sidestep_adapters")
"""Packages whose lines appear; sources of the second run in the exporter."""


class _Text(logging.Formatter):
    """A line of printable characters, and an indented traceback, if there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return escape(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Return the traceback, no line of which looks like one of the log."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {escape(line)}" for line in lines)


class _Json(logging.Formatter):
    """One JSON object per line; a record's ``fields`` become members beside the line's own."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        line = {**line, **getattr(record, "fields", {}), **line}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return escape(msgspec.json.encode(line).decode())


def _rfc3339(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


MAX_CHARS = 500
"""Characters of a kept warning."""


class _Recent(logging.Handler):
    """Keeps the last lines in memory, for the debug page, and the last warnings, for the live page.

    Attributes:
        warnings: Unix time and text, without traceback, of lines of level warning and above.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=200)
        self.warnings: deque[tuple[float, str]] = deque(maxlen=20)
        self.setFormatter(_Text())

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line; one that cannot be formatted is a line of standard error, as for any handler."""
        try:
            self.lines.append(self.format(record))
            if record.levelno >= logging.WARNING:
                self.warnings.append((record.created, record.getMessage()[:MAX_CHARS]))
        except Exception:  # noqa: BLE001 - no log line may end what logs it
            self.handleError(record)


recent = _Recent()


def set_up(level: str, form: str) -> None:
    """Send this process's log lines to standard error, and keep the last ones."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    if logging.lastResort is not None:  # what other packages log
        logging.lastResort.setFormatter(handler.formatter)
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers = [handler, recent]
        logger.propagate = False
    set_level(level)


def set_level(level: str) -> None:
    """Log lines of ``level`` and above from now on."""
    for name in PACKAGES:
        logging.getLogger(name).setLevel(level.upper())


INTERVAL = 60.0
"""Seconds between two rate-limited lines of a kind."""


class RateLimitedLog:
    """Logs at most one line of a kind per ``INTERVAL``, with the number of suppressed lines.

    For events that a peer can cause as often as it likes.

    Args:
        kinds: Kinds to distinguish; all others count as one kind. This bounds the memory even if a
            peer chooses the kind.
    """

    def __init__(
        self,
        logger: logging.Logger,
        kinds: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._kinds = kinds
        self._clock = clock
        self._known: dict[str, tuple[float, int]] = {}

    def info(
        self, kind: str, message: str, *arguments: object, fields: Fields | None = None
    ) -> None:
        """Log a line of ``kind`` unless one was logged within the interval.

        ``fields`` become members of a line in JSON.
        """
        self._log(logging.INFO, kind, message, *arguments, fields=fields)

    def warning(
        self, kind: str, message: str, *arguments: object, fields: Fields | None = None
    ) -> None:
        """Log a warning of ``kind`` unless one was logged within the interval."""
        self._log(logging.WARNING, kind, message, *arguments, fields=fields)

    def error(self, kind: str, message: str, *arguments: object, trace: object = None) -> None:
        """Log an error, with the traceback of ``trace``, unless one was logged within the interval."""
        self._log(logging.ERROR, kind, message, *arguments, trace=trace)

    def _log(
        self,
        level: int,
        kind: str,
        message: str,
        *arguments: object,
        trace: Any = None,
        fields: Fields | None = None,
    ) -> None:
        """Log a line at ``level``; a line below the logger's level does not count."""
        if not self._logger.isEnabledFor(level):
            return
        left_out = self._suppressed(kind)
        if left_out < 0:
            return
        if left_out:
            message += " (%d more like this since the last)"
            arguments = (*arguments, left_out)
        extra = {"fields": fields or {}}
        self._logger.log(level, message, *arguments, exc_info=trace, extra=extra)

    def _suppressed(self, kind: str) -> int:
        """Count a line of ``kind``.

        Returns:
            The number of lines suppressed since the last one if this line is due, else -1.
        """
        now = self._clock()
        if kind not in self._known and len(self._known) >= self._kinds:
            self._forget(now)
        if kind not in self._known and len(self._known) >= self._kinds:
            kind = ""
        since, count = self._known.get(kind, (-math.inf, 0))
        if now - since < INTERVAL:
            self._known[kind] = since, count + 1
            return -1
        self._known[kind] = now, 0
        return count

    def _forget(self, now: float) -> None:
        """Drop kinds whose interval is over; their suppressed lines count as of no kind."""
        over = [kind for kind, (since, _) in self._known.items() if now - since >= INTERVAL]
        left_out = sum(self._known.pop(kind)[1] for kind in over)
        if left_out:
            since, count = self._known.get("", (-math.inf, 0))
            self._known[""] = since, count + left_out
