"""The thread that writes records to the file of ``--requests.log``: a slow disk delays nothing else."""

from __future__ import annotations

import logging
import threading
import time

from sidestep.requests.log_file import LineSink
from sidestep.requests.record_queue import MAX_PENDING, RecordQueue
from sidestep.telemetry.logs import RateLimitedLog

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
CLOSE_SECONDS = 3.0
"""Seconds that the last records have to be written when the exporter stops."""


class LogWriter:
    """Writer of the records in a queue; only its thread removes them.

    Args:
        queue: The records.
        sink: Where their lines go.
    """

    def __init__(self, queue: RecordQueue, sink: LineSink) -> None:
        self._queue = queue
        self._sink = sink
        self._has_work = threading.Event()
        self._is_closing = False
        self._lines = RateLimitedLog(log)
        self._thread = threading.Thread(target=self._run, name="sidestep-requests", daemon=True)
        queue.wake = self._has_work.set

    def start(self) -> None:
        """Start to write."""
        self._thread.start()

    def close(self) -> None:
        """Write the last records, unless that takes longer than ``CLOSE_SECONDS``."""
        self._is_closing = True
        self._has_work.set()
        self._thread.join(CLOSE_SECONDS)
        if self._queue:
            log.warning("%d records of requests are not written", len(self._queue))

    def _run(self) -> None:
        while True:
            self._has_work.wait()
            self._has_work.clear()
            while self._queue:
                batch = self._queue.first()
                try:
                    self._sink.write(b"".join(batch))
                except OSError as error:
                    self._lines.warning(
                        "write",
                        "cannot write --requests.log: %s; up to %d records wait",
                        error.strerror or error,
                        MAX_PENDING,
                    )
                    if self._is_closing:
                        return
                    time.sleep(RETRY_SECONDS)
                    continue
                self._queue.drop(len(batch))
            if self._is_closing:
                return
