"""Push of the page's families to a receiver of OTLP, at an interval.

Totals are cumulative, so nothing is queued: what a failed push did not deliver is in the next one.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)

from sidestep.exposition.proto_format import MAX_COUNT
from sidestep.metrics.exponential_buckets import coarser
from sidestep.otlp.destination import Destination
from sidestep.otlp.increments import Increments
from sidestep.otlp.page_families import Exponential, PageFamilies, Series, SeriesFamily
from sidestep.otlp.resource import SCOPE, Resource
from sidestep.telemetry.self_metrics import SelfMetrics

MAX_POINTS = 2000
"""Most points of one request: gRPC receivers take 4 MiB by default."""
MAX_WIDTH = 320
"""Most exponential buckets from the lowest to the highest: OTLP sends the empty ones between, too."""
EXTREMES: Mapping[str, Any] = {"min": None, "max": None}
"""The page has no extremes. The encoder leaves None out, which the SDK's types do not say."""

Points = dict[type, list[Any]]
"""Points of one family by their class."""
FINISH_SECONDS = 3.0
"""Seconds for the last push during shutdown."""


class MetricSender:
    """Pushes the families of the page to a receiver.

    A push copies all values at one moment, on the event loop. A thread makes the SDK's objects and
    sends them. The process does not wait for that thread when it ends.
    """

    def __init__(
        self,
        families: PageFamilies,
        increments: Increments,
        resource: Resource,
        destination: Destination,
        metrics: SelfMetrics,
        *,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._families = families
        self._increments = increments
        self._resource = resource
        self._destination = destination
        self._metrics = metrics
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
        # Receivers refuse a whole request if the time of a series decreases. They may also refuse a time in
        # the future, which a wrong clock gives: only a time that was accepted is a lower limit of the next.
        stamp = max(self._wall(), self._stamp + 1)
        families = await self._families.copy()
        await self._families.copier.settled()
        work = functools.partial(self._send, families, stamp)
        self._export = asyncio.ensure_future(_in_thread(work))
        return await asyncio.shield(self._export)

    async def finish(self) -> None:
        """Push a last time, unless the push before failed, and close the connection."""
        # Everything has been saved, and the snapshots' schedule has ended.
        self._families.copier.snapshots = None
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
        increments.save(stamp, has_read_all="failed" not in outcomes)
        if "accepted" in outcomes:
            self._stamp = stamp
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


def batches(
    families: Iterable[SeriesFamily], stamp: int, delta: Collection[str]
) -> Iterator[tuple[list[Metric], int]]:
    """Yield metrics of at most ``MAX_POINTS`` points, and the number of these.

    Args:
        families: The families; no series is read before all those before it were yielded.
        stamp: Unix time of the points in nanoseconds.
        delta: Kinds of families whose values are increments.
    """
    metrics: list[Metric] = []
    count = 0
    for family in families:
        is_delta = family.kind in delta
        points: Points = {}
        for one in family.series:
            point = _point(one, stamp)
            points.setdefault(type(point), []).append(point)
            count += 1
            if count == MAX_POINTS:
                yield [*metrics, *_metrics(family, points, is_delta=is_delta)], count
                metrics, points, count = [], {}, 0
        metrics += _metrics(family, points, is_delta=is_delta)
    if metrics:
        yield metrics, count


def _metrics(family: SeriesFamily, points: Points, *, is_delta: bool) -> Iterator[Metric]:
    """Yield a metric for each class of points; a family can have histograms of two classes."""
    temporality = AggregationTemporality.DELTA if is_delta else AggregationTemporality.CUMULATIVE
    for kind, found in points.items():
        data: Gauge | Sum | Histogram | ExponentialHistogram = Gauge(found)
        if kind is HistogramDataPoint:
            data = Histogram(found, temporality)
        elif kind is ExponentialHistogramDataPoint:
            data = ExponentialHistogram(found, temporality)
        elif family.kind == "counter":
            data = Sum(found, temporality, is_monotonic=True)
        yield Metric(family.name, family.help, "", data)


def _point(
    one: Series, stamp: int
) -> NumberDataPoint | HistogramDataPoint | ExponentialHistogramDataPoint:
    """Return the point of a series; to Prometheus, an empty label is a missing one."""
    attributes = {name: value for name, value in one.labels.items() if value}
    start, value = min(one.start, stamp), one.value
    if isinstance(value, Exponential):
        return _exponential_point(attributes, start, stamp, value)
    if isinstance(value, tuple):
        bounds, counts, total = value
        return HistogramDataPoint(
            attributes=attributes,
            start_time_unix_nano=start,
            time_unix_nano=stamp,
            count=min(sum(counts), MAX_COUNT),
            sum=total,
            bucket_counts=_bounded(counts),
            explicit_bounds=bounds,
            **EXTREMES,
        )
    return NumberDataPoint(attributes, start, stamp, float(value))


def _exponential_point(
    attributes: Mapping[str, str], start: int, stamp: int, value: Exponential
) -> ExponentialHistogramDataPoint:
    """Return a point; OTLP's index of the same bucket is lower by one, and its counts are dense."""
    buckets, scale = value.buckets, value.scale
    while buckets and max(buckets) - min(buckets) >= MAX_WIDTH:
        buckets, scale = coarser(buckets), scale - 1
    lowest = min(buckets, default=1)
    counts = [0] * (max(buckets, default=0) - lowest + 1)
    for index, count in buckets.items():
        counts[index - lowest] = count
    return ExponentialHistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=start,
        time_unix_nano=stamp,
        count=min(value.zeros + sum(counts), MAX_COUNT),
        sum=value.total,
        scale=scale,
        zero_count=min(value.zeros, MAX_COUNT),
        positive=Buckets(lowest - 1, _bounded(counts)),
        negative=Buckets(0, []),
        flags=0,
        **EXTREMES,
    )


def _bounded(counts: Sequence[int]) -> list[int]:
    return [min(count, MAX_COUNT) for count in counts]
