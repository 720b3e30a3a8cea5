"""Push of the page's families to a receiver of OTLP, at an interval.

Totals are cumulative, so nothing is queued: what a failed push did not deliver is in the next one.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics

from sidestep.exposition.pages import Durable, Hold
from sidestep.otlp.destination import Destination
from sidestep.otlp.increments import Increments
from sidestep.otlp.page_families import PageFamilies, SeriesFamily
from sidestep.otlp.points import batches
from sidestep.otlp.resource import SCOPE, Resource
from sidestep.telemetry.self_metrics import SelfMetrics

FINISH_SECONDS = 3.0
"""Seconds for the last push during shutdown."""


class MetricSender:
    """Pushes the families of the page to a receiver.

    A push copies all values at one moment, on the event loop. A thread makes the SDK's objects and
    sends them. The process does not wait for that thread when it ends.

    Args:
        families: The families.
        increments: Increments of the families that are sent with delta temporality.
        resource: Resource of the requests.
        destination: The receiver.
        metrics: Self-metrics.
        hold: Pauses all changes for a block, so that a push is of one moment.
        snapshots: If given, a push is sent only once a snapshot holds what it contains, so that no
            counter that a receiver has seen decreases after a crash.
        wall: Nanoseconds since 1970.
    """

    def __init__(
        self,
        families: PageFamilies,
        increments: Increments,
        resource: Resource,
        destination: Destination,
        metrics: SelfMetrics,
        *,
        hold: Hold,
        snapshots: Durable | None = None,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._families = families
        self._increments = increments
        self._resource = resource
        self._destination = destination
        self._metrics = metrics
        self._hold = hold
        self._snapshots = snapshots
        self._wall = wall
        self._stamp = 0
        self._export: asyncio.Future[bool] | None = None
        """The last export, which a cancelled push leaves running."""
        metrics.set("sidestep_otlp_last_success_timestamp_seconds", 0.0)

    async def run(self, interval: float) -> None:
        """Push every ``interval`` seconds until cancelled; one push runs at a time."""
        while True:
            started = time.monotonic()
            await self.push()
            await asyncio.sleep(max(started + interval - time.monotonic(), 0.0))

    async def push(self) -> bool:
        """Send the present state of all families; return whether all of it was accepted."""
        # Receivers refuse a whole request if the time of a series decreases.
        self._stamp = max(self._wall(), self._stamp + 1)
        async with self._hold():
            families = self._families.copy()
        if self._snapshots is not None:
            await self._snapshots.settled()
        work = functools.partial(self._send, families, self._stamp)
        self._export = asyncio.ensure_future(_in_thread(work))
        return await asyncio.shield(self._export)

    async def finish(self) -> None:
        """Push a last time, unless the push before failed, and close the connection."""
        # Everything has been saved, and the snapshots' schedule has ended.
        self._snapshots = None
        try:
            await asyncio.wait_for(self._finish(), FINISH_SECONDS)
        except asyncio.TimeoutError:
            self._destination.timed_out(FINISH_SECONDS)
        finally:
            self._destination.close()

    async def _finish(self) -> None:
        if self._export is None or await asyncio.shield(self._export):
            await self.push()

    def _send(self, families: Iterable[SeriesFamily], stamp: int) -> bool:
        """Send the families until a request fails in a way that the next one would, too."""
        increments, outcomes = self._increments, set()
        for metrics, points in batches(increments.of(families, stamp), stamp, increments.kinds):
            scope = ScopeMetrics(SCOPE, metrics, "")
            data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
            outcome = self._destination.export(data, points)
            outcomes.add(outcome)
            if outcome == "accepted":
                increments.commit()
            else:
                increments.discard()
            if outcome == "failed":
                break
        else:
            # Series whose first total is no increment may be the last ones.
            increments.commit()
        increments.save(stamp)
        is_accepted = outcomes <= {"accepted"}
        if is_accepted:
            self._metrics.set("sidestep_otlp_last_success_timestamp_seconds", self._wall() / 1e9)
        return is_accepted


async def _in_thread(work: Callable[[], bool]) -> bool:
    """Return the result of ``work``, which may block for as long as it likes."""
    done: Future[bool] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="sidestep-otlp", daemon=True).start()
    return await asyncio.wrap_future(done)
