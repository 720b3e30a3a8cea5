"""The thread that writes records to one output: a slow disk or receiver delays nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sidestep.requests.record_queue import RecordQueue

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Seconds before records are written again; they double up to the most that an output allows."""
CLOSE_SECONDS = 3.0
"""Seconds that the last records have to be written when the exporter stops."""
Write = Callable[[list[bytes]], bool]
"""Writes records, as lines; returns whether the output is done with them."""


class RecordWriter:
    """Writer of the records in a queue; only its thread removes them.

    Args:
        queue: The records.
        write: Writes the first of them, and may block.
        max_pause: Most seconds before they are written again.
        period: Least seconds between two wakes, in which records are collected.
    """

    def __init__(
        self,
        queue: RecordQueue,
        write: Write,
        max_pause: float = RETRY_SECONDS,
        period: float = 0.0,
    ) -> None:
        self._queue = queue
        self._write = write
        self._max_pause = max_pause
        self._period = period
        self._has_work = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"sidestep-{queue.output}", daemon=True
        )
        queue.wake = self._has_work.set

    def start(self) -> None:
        """Start to write."""
        self._has_work.set()
        self._thread.start()

    def close(self) -> None:
        """Write the last records, unless that takes longer than ``CLOSE_SECONDS``."""
        self._is_closing.set()
        self._has_work.set()
        self._thread.join(CLOSE_SECONDS)
        if self._queue:
            log.warning(
                "%d records of requests are not written to %s", len(self._queue), self._queue.output
            )

    def _run(self) -> None:
        while True:
            self._has_work.wait()
            self._has_work.clear()
            is_closing = self._is_closing.is_set()
            if not self._write_all() or is_closing:
                return
            self._is_closing.wait(self._period)

    def _write_all(self) -> bool:
        """Write all records in the queue; return False if the last attempt of a shutdown fails."""
        pause = RETRY_SECONDS
        while self._queue:
            is_closing = self._is_closing.is_set()
            batch = self._queue.first()
            if self._write(batch):
                self._queue.drop(len(batch))
                pause = RETRY_SECONDS
            elif is_closing:
                return False
            else:
                self._is_closing.wait(pause)
                pause = min(2 * pause, self._max_pause)
        return True
