"""The exporter's latest warnings, for people who have no access to its log."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator

from sidestep.exposition.live.rows import Warned
from sidestep.telemetry.logs import PACKAGES

MAX_WARNINGS = 20
MAX_CHARS = 500


class RecentWarnings(logging.Handler):
    """A log handler that keeps the last lines of level warning and above, without tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[Warned] = deque(maxlen=MAX_WARNINGS)

    @property
    def latest(self) -> list[Warned]:
        """The lines, the newest first."""
        return [*reversed(self._lines)]

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        try:
            self._lines.append(Warned(record.created, record.getMessage()[:MAX_CHARS]))
        except Exception:  # noqa: BLE001 - as every handler of the standard library
            self.handleError(record)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Keep the lines of this project's packages until the block ends."""
        loggers = [logging.getLogger(name) for name in PACKAGES]
        for logger in loggers:
            logger.addHandler(self)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(self)
