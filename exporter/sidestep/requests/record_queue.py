"""A bounded queue of records that wait for one output: the file, logs or traces."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics

log = logging.getLogger(__name__)

MAX_PENDING = 20_000
"""Records that wait for an output, some 16 MB; more are lost and counted."""
BATCH, BATCH_BYTES = 500, 1 << 20
"""Most records that an output takes at once, and about the most bytes of them."""
LOST = "sidestep_request_records_lost_total"


class RecordQueue:
    """Records as lines of JSON, which the outputs share.

    A record stays until its output is done with it, so that a snapshot has it until then.

    Args:
        output: Name of the output, for metrics and snapshots.
        flag: The flag that names its destination.
        metrics: Self-metrics that count lost records.

    Attributes:
        taken: Number of records that have left the queue.
        wake: Called when there are records; a writer replaces it.
    """

    def __init__(self, output: str, flag: str, metrics: SelfMetrics) -> None:
        self.output = output
        self.taken = 0
        self.wake: Callable[[], None] = lambda: None
        self._flag = flag
        self._metrics = metrics
        self._lines: deque[bytes] = deque()
        self._log = RateLimitedLog(log)

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
        self.wake()

    def lose(self, reason: str) -> None:
        """Count a record that the output will not have."""
        self._metrics.add(LOST, 1, reason, self.output)

    def restore(self, lines: Iterable[bytes]) -> None:
        """Append the records of a snapshot."""
        self._lines.extend(lines)
        self.wake()

    def first(self) -> list[bytes]:
        """Return the next records, which stay in the queue until ``drop``."""
        found: list[bytes] = []
        size = 0
        # Not iterated: in a thread, records may be appended meanwhile.
        for place in range(min(len(self._lines), BATCH)):
            line = self._lines[place]
            size += len(line)
            if found and size > BATCH_BYTES:
                break
            found.append(line)
        return found

    def drop(self, count: int) -> None:
        """Remove the next records, with which the output is done."""
        for _ in range(count):
            self._lines.popleft()
        self.taken += count

    def chunks(self) -> Iterator[list[bytes]]:
        """Yield the records that are in the queue at the first call, ``BATCH`` at a time."""
        lines = list(self._lines)
        for start in range(0, len(lines), BATCH):
            yield lines[start : start + BATCH]
