"""Log lines of the process: text for people or JSON for collectors, on standard error."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

import msgspec

INTERVAL = 60.0
MAX_KEYS = 256


class _Json(logging.Formatter):
    """One JSON object a line; a record's ``fields`` become members."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return time.strftime(datefmt or "", time.gmtime(record.created))


def set_up(level: str, form: str) -> None:
    """Send this process's log lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logger = logging.getLogger("sidestep")
    logger.handlers = [handler]
    logger.propagate = False
    set_level(level)


def set_level(level: str) -> None:
    """Log lines of ``level`` and above from now on."""
    logging.getLogger("sidestep").setLevel(level.upper())


class Limited:
    """At most one line a minute and key; the next one says how many were left out.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}

    def warning(self, key: str, text: str, *args: object) -> None:
        """Log a warning."""
        self._log(logging.WARNING, key, text, args)

    def exception(self, key: str, text: str, *args: object) -> None:
        """Log an error with the traceback that is being handled."""
        self._log(logging.ERROR, key, text, args, exc_info=True)

    def _log(
        self, level: int, key: str, text: str, args: tuple[object, ...], *, exc_info: bool = False
    ) -> None:
        now = self._clock()
        at, left_out = self._said.get(key, (now - INTERVAL, 0))
        if now - at < INTERVAL:
            self._said[key] = at, left_out + 1
            return
        if len(self._said) >= MAX_KEYS:
            self._said.clear()
        self._said[key] = now, 0
        if left_out:
            text = f"{text} ({left_out} more like this in the last minute)"
        self._logger.log(level, text, *args, exc_info=exc_info)
