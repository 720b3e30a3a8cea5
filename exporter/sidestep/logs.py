"""Log lines of the process: text for people or JSON for collectors, on standard error."""

from __future__ import annotations

import logging
import sys
import time

import msgspec


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
