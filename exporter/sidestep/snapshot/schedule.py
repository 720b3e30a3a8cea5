"""Snapshot schedule: periodically while state changes, and before a scrape is answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sidestep.errors import WireError
from sidestep.ingest.socket_loop import Ingest
from sidestep.requests.request_log import RequestLog
from sidestep.snapshot.capture import Capture, restore
from sidestep.snapshot.state_file import StateDirectory
from sidestep.telemetry.logs import RateLimitedLog

log = logging.getLogger(__name__)

INTERVAL = 0.25
"""Least seconds between two snapshots."""
MIN_PAUSE = 4
"""Least pause after a snapshot, as a multiple of its duration."""
RETRY = 1.0
"""Seconds between attempts while the directory cannot be written."""
PATIENCE = 4.0
"""Seconds that a page waits for a snapshot: less than a scrape timeout."""


class Snapshots:
    """Schedule that keeps the state directory's snapshot close to the applied state.

    Attributes:
        directory: The state directory. The caller releases it after the schedule has ended.
    """

    def __init__(
        self,
        directory: StateDirectory,
        ingest: Ingest,
        request_log: RequestLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.directory = directory
        self._ingest = ingest
        self._intake = ingest.intake
        self._request_log = request_log
        self._capture = Capture(ingest.intake, request_log)
        self._clock = clock
        self._wall = wall
        self._healthy = True
        self._lock = asyncio.Lock()
        self._writer = ThreadPoolExecutor(1, "sidestep-snapshot")
        self._lines = RateLimitedLog(log, clock=clock)
        metrics = self._intake.metrics
        metrics.read("sidestep_snapshot_healthy", lambda: [((), float(self._healthy))])

    def recover(self) -> str:
        """Restore the directory's snapshot if there is one, and return the outcome as text."""
        try:
            pieces = self.directory.read()
            if pieces is not None:
                restore(self._intake, pieces, self._clock(), self._request_log)
        except WireError as error:
            name = self.directory.set_aside()
            done = f"was set aside as {name}" if name else "cannot be renamed"
            self._intake.metrics.add("sidestep_recovered_total", 1, "damaged")
            log.error(  # noqa: TRY400 - the error text suffices, no traceback
                "the snapshot in %s cannot be read (%s) and %s: all counters start at 0",
                self.directory.path,
                error,
                done,
            )
            return f"a damaged snapshot {done}, counters start at 0"
        found = "none" if pieces is None else "snapshot"
        self._intake.metrics.add("sidestep_recovered_total", 1, found)
        if pieces is None:
            return "no snapshot yet, counters start at 0"
        engines = len(self._intake.registry.engines)
        return f"restored the counters of {engines} engine{'s' if engines != 1 else ''}"

    async def run(self) -> None:
        """Write snapshots until cancelled."""
        while True:
            started = self._clock()
            # What has failed may have been a page's, of counters that alone cause no write here.
            await self._save(with_own=not self._healthy)
            took = self._clock() - started
            await asyncio.sleep(max(INTERVAL, MIN_PAUSE * took) if self._healthy else RETRY)

    async def settled(self) -> None:
        """Return when everything counted before the call is in a written snapshot.

        While the directory cannot be written, return at once: a page whose counters might
        decrease after a restart is better than no page.
        """
        if not self._healthy:
            return
        saving = asyncio.create_task(self._save(with_own=True))
        done, _ = await asyncio.wait({saving}, timeout=PATIENCE)
        for task in done:
            task.result()
        if not done:
            self._healthy = False
            self._lines.warning(
                "slow",
                "writing the snapshot in %s takes over %g s; pages no longer wait for it",
                self.directory.path,
                PATIENCE,
            )

    async def close(self) -> None:
        """Write the last snapshot."""
        await self._save(with_own=True)
        self._writer.shutdown()

    async def _save(self, *, with_own: bool = False) -> None:
        """Write a snapshot, unless another task has written one that includes the current state.

        ``with_own``: also of the exporter's own counters, which heartbeats change all the time.
        """
        wanted, counts = self._capture.state, self._capture.counts if with_own else 0.0
        async with self._lock:
            if self._capture.saved < wanted or self._capture.saved_counts < counts:
                await self._save_now()

    async def _save_now(self) -> None:
        started = time.perf_counter()
        metrics = self._intake.metrics
        loop = asyncio.get_running_loop()
        try:
            async with self._ingest.held():
                # In a thread, where nothing changes meanwhile: engines take up to 0.1 ms each.
                begin = self._capture.begin()
                pieces = await loop.run_in_executor(self._writer, self._capture.encode, begin)
            size = await loop.run_in_executor(self._writer, self.directory.write, pieces)
        except Exception as error:  # noqa: BLE001 - after a restart, what a bug fails at would come again
            self._healthy = False
            metrics.add("sidestep_snapshot_errors_total")
            self._lines.error(
                "write",
                "cannot write the snapshot in %s: %s; pages are served, but a restart would lose what"
                " they show, and senders keep their unacknowledged frames",
                self.directory.path,
                getattr(error, "strerror", None) or f"{error!r}, a bug in sidestep",
                trace=None if isinstance(error, OSError) else error,
            )
            return
        if not self._healthy:
            log.info("snapshots can be written again")
        self._healthy = True
        metrics.set("sidestep_snapshot_duration_seconds", time.perf_counter() - started)
        metrics.set("sidestep_snapshot_bytes", size)
        metrics.set("sidestep_snapshot_timestamp_seconds", self._wall())
        self._capture.mark_saved()
        self._ingest.acknowledge()
