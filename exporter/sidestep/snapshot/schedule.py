"""When snapshots are made: while anything changes, and before a page may be seen."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from sidestep.errors import WireError
from sidestep.federation.computed_records import Present
from sidestep.ingest.socket_loop import Ingest
from sidestep.metrics.engine import Engine
from sidestep.snapshot.capture import Capture, restore
from sidestep.snapshot.state_file import StateDirectory
from sidestep.telemetry.logs import RateLimitedLog

log = logging.getLogger(__name__)

INTERVAL = 0.25
SHARE = 4
"""Of the time a snapshot takes, so many times must pass until the next that no page waits for."""
RETRY = 1.0
"""Seconds between two tries while the directory takes nothing."""
PATIENCE = 4.0
"""Seconds that a page waits for a snapshot: less than a scrape may take."""
SLICE = 0.001
"""Seconds of encoding after which the loop gets a turn."""


class Safe:
    """Records that a snapshot has, for whom nobody may take anything back.

    While the directory takes nothing, those of now: what they say would not outlive this process
    then, as on its own page.
    """

    settles = 0.0

    def __init__(self, capture: Capture, is_healthy: Callable[[], bool]) -> None:
        self._capture = capture
        self._is_healthy = is_healthy
        self._present = Present()

    def version(self, engine: Engine) -> int | None:
        """Of the record of ``engine``; None where there is none yet."""
        # Before the first snapshot nobody would know of this process as one that had spoken.
        if self._is_healthy() or not self._capture.has_saved:
            return self._capture.version(engine)
        return self._present.version(engine)

    def record(self, engine: Engine) -> bytes:
        """It."""
        if self._is_healthy():
            return self._capture.record(engine)
        return self._present.record(engine)


class Snapshots:
    """Keeps the state directory's snapshot close behind what was applied."""

    def __init__(
        self,
        directory: StateDirectory,
        ingest: Ingest,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._ingest = ingest
        self._intake = ingest.intake
        self._capture = Capture(ingest.intake)
        self._clock = clock
        self._wall = wall
        self._healthy = True
        self._lock = asyncio.Lock()
        self._writer = ThreadPoolExecutor(1, "sidestep-snapshot")
        self._lines = RateLimitedLog(log, clock=clock)
        metrics = self._intake.metrics
        metrics.read("sidestep_snapshot_healthy", lambda: [((), float(self._healthy))])
        self._intake.receiver.durable = True

    def recover(self) -> str:
        """Take over the directory's snapshot, if there is one; what was found, for people."""
        try:
            pieces = self._directory.read()
            if pieces is not None:
                restore(self._intake, pieces, self._clock())
        except WireError as error:
            self._directory.set_aside()
            self._intake.metrics.add("sidestep_recovered_total", 1, "damaged")
            log.error(  # noqa: TRY400 - what is wrong with the file is all there is to say
                "the snapshot in %s cannot be read (%s) and was set aside as snapshot.damaged:"
                " all counters start anew",
                self._directory.path,
                error,
            )
            return "a damaged snapshot was set aside, counters start anew"
        found = "none" if pieces is None else "snapshot"
        self._intake.metrics.add("sidestep_recovered_total", 1, found)
        if pieces is None:
            return "no snapshot yet, counters start anew"
        engines = len(self._intake.registry.engines)
        return f"went on with the counters of {engines} engine{'s' if engines != 1 else ''}"

    async def run(self) -> None:
        """Make snapshots until cancelled."""
        while True:
            started = self._clock()
            await self._save()
            took = self._clock() - started
            await asyncio.sleep(max(INTERVAL, SHARE * took) if self._healthy else RETRY)

    async def settled(self) -> None:
        """Return when all that was applied before the call outlives this process.

        Where the directory takes nothing it returns at once: to show what might be
        taken back is better than to show nothing.
        """
        if not self._healthy:
            return
        saving = asyncio.create_task(self._save())
        done, _ = await asyncio.wait({saving}, timeout=PATIENCE)
        for task in done:
            task.result()
        if not done:
            self._healthy = False
            self._lines.warning(
                "slow",
                "writing the snapshot in %s takes over %g s; pages do not wait for it any more",
                self._directory.path,
                PATIENCE,
            )

    @property
    def records(self) -> Safe:
        """Engines' records that the directory has."""
        return Safe(self._capture, lambda: self._healthy)

    async def close(self) -> None:
        """Make the last snapshot; the directory is free afterwards."""
        await self._save()
        self._writer.shutdown()
        self._directory.release()

    async def _save(self) -> None:
        """A snapshot of now, unless one that began after the call is there by then."""
        wanted = self._capture.state
        async with self._lock:
            if self._capture.saved < wanted:
                await self._save_now()

    async def _save_now(self) -> None:
        started = time.perf_counter()
        metrics = self._intake.metrics
        async with self._ingest.held():
            pieces = await self._pieces()
        loop = asyncio.get_running_loop()
        try:
            size = await loop.run_in_executor(self._writer, self._directory.write, pieces)
        except OSError as error:
            self._healthy = False
            metrics.add("sidestep_snapshot_errors_total")
            self._lines.warning(
                "write",
                "cannot write the snapshot in %s: %s; pages are served, but what they show would"
                " not outlive this process, and senders hold what they have",
                self._directory.path,
                error.strerror or error,
            )
            return
        if not self._healthy:
            log.info("snapshots can be written again")
        self._healthy = True
        metrics.set("sidestep_snapshot_duration_seconds", time.perf_counter() - started)
        metrics.set("sidestep_snapshot_bytes", size)
        metrics.set("sidestep_snapshot_timestamp_seconds", self._wall())
        self._capture.safe()
        self._ingest.acknowledge()

    async def _pieces(self) -> Sequence[bytes]:
        pieces: list[bytes] = []
        since = time.perf_counter()
        for piece in self._capture.pieces():
            pieces.append(piece)
            if time.perf_counter() - since > SLICE:
                await asyncio.sleep(0)
                since = time.perf_counter()
        return pieces
