"""One output of records, such as the file or traces: a bounded queue, and the thread that writes it.

A slow disk or receiver delays nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics

log = logging.getLogger(__name__)

MAX_PENDING = 20_000
"""Records that wait for an output, some 16 MB; more are lost and counted."""
BATCH, BATCH_BYTES = 500, 1 << 20
"""Most records that an output takes at once, and about the most bytes of them."""
RETRY_SECONDS = 1.0
"""Seconds before records are written again; they double up to the most that an output allows."""
CLOSE_SECONDS = 3.0
"""Seconds that the last records have to be written when the exporter stops."""
LOST = "sidestep_request_records_lost_total"
Write = Callable[[list[bytes]], bool]
"""Writes records, as lines of JSON, and may block; returns whether the output is done with them."""


class RecordOutput:
    """Records as lines of JSON, which the outputs share.

    A record stays until its output is done with it, so that a snapshot has it until then.

    Args:
        name: Name of the output, for metrics and snapshots.
        flag: The flag that names its destination.

    Attributes:
        taken: Number of records that have left the queue.
    """

    def __init__(self, name: str, flag: str, metrics: SelfMetrics) -> None:
        self.name = name
        self.taken = 0
        self._flag = flag
        self._metrics = metrics
        self._lines: deque[bytes] = deque()
        self._log = RateLimitedLog(log)
        self._has_work = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sidestep-{name}", daemon=True)
        self._max_pause, self._period = RETRY_SECONDS, 0.0
        self._write: Write = lambda _: False

    def __len__(self) -> int:
        """Return the number of records that wait."""
        return len(self._lines)

    def put(self, line: bytes) -> None:
        """Append a record, unless the queue is full."""
        if len(self._lines) >= MAX_PENDING:
            self.lose("full")
            self._log.warning(
                "full",
                "records of requests are lost: %s takes them too slowly or not at all",
                self._flag,
            )
            return
        self._lines.append(line)
        self._has_work.set()

    def lose(self, reason: str) -> None:
        """Count a record that the output will not have."""
        self._metrics.add(LOST, 1, reason, self.name)

    def restore(self, lines: Iterable[bytes]) -> None:
        """Append the records of a snapshot."""
        self._lines.extend(lines)
        self._has_work.set()

    def chunks(self) -> Iterator[list[bytes]]:
        """Yield the records that are in the queue at the first call, ``BATCH`` at a time."""
        lines = list(self._lines)
        for start in range(0, len(lines), BATCH):
            yield lines[start : start + BATCH]

    def write_by(self, write: Write, max_pause: float = RETRY_SECONDS, period: float = 0.0) -> None:
        """Set how records are written, before the thread starts.

        Args:
            write: Writes the first records.
            max_pause: Most seconds before they are written again.
            period: Least seconds between two wakes, in which records are collected.
        """
        self._write, self._max_pause, self._period = write, max_pause, period

    def start(self) -> None:
        """Start to write."""
        self._has_work.set()
        self._thread.start()

    def close(self) -> None:
        """Write the last records, unless that takes longer than ``CLOSE_SECONDS``."""
        self._is_closing.set()
        self._has_work.set()
        self._thread.join(CLOSE_SECONDS)
        if self._lines:
            log.warning("%d records of requests are not written to %s", len(self), self.name)

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
        while self._lines:
            is_closing = self._is_closing.is_set()
            batch = self._first()
            if self._write(batch):
                for _ in batch:
                    self._lines.popleft()
                self.taken += len(batch)
                pause = RETRY_SECONDS
            elif is_closing:
                return False
            else:
                self._is_closing.wait(pause)
                pause = min(2 * pause, self._max_pause)
        return True

    def _first(self) -> list[bytes]:
        """Return the next records, which stay in the queue."""
        found: list[bytes] = []
        size = 0
        # Not iterated: records may be appended meanwhile.
        for place in range(min(len(self._lines), BATCH)):
            line = self._lines[place]
            size += len(line)
            if found and size > BATCH_BYTES:
                break
            found.append(line)
        return found
