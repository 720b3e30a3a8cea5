"""Replay of a recording to an exporter through real publishers."""

from __future__ import annotations

import dataclasses
import itertools
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import Item
from sidestep.engines.sglang.wire import SglangRequests, SglangStats
from sidestep.engines.vllm.wire import VllmStep
from sidestep.errors import ConfigError, RunError, WireError
from sidestep.protocol.block_events import BlockEvents, CacheEvents
from sidestep.protocol.cache_lookups import CacheLookups
from sidestep.protocol.limits import COUNT_LIMIT, printable
from sidestep.protocol.messages import CORE, EngineInfo
from sidestep.protocol.progress import Progress as EngineProgress
from sidestep.protocol.request_events import RequestEvents
from sidestep_adapters.publisher.progress import ProgressMeter, Reading
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.publisher.queue import QUEUE_ITEMS
from sidestep_adapters.recording.format import Items, StreamStart, read
from sidestep_adapters.triton.wire import TritonStats

BACKLOG_BYTES = 2 << 20
"""Bytes in flight at which a replay without ``realtime`` pauses."""
CONNECT_TIMEOUT = 10.0
"""Default seconds to wait for the exporter to answer."""
UNIX_TIMES = "arrival", "wall", "known_until", "iteration_timestamp"
"""Names of the fields that have Unix times of requests."""


@dataclasses.dataclass(slots=True)
class Progress:
    """Progress of a replay: replayed records, and complete rounds."""

    records: int = 0
    rounds: int = 0


@dataclasses.dataclass(slots=True)
class _Steps:
    """Steps of one engine.

    Attributes:
        longest: Seconds between two steps, the longest since the last heartbeat.
    """

    meter: ProgressMeter
    count: int = 0
    unfinished: int = 0
    ended_at: float = 0.0
    longest: float = 0.0


class ReplayedSteps:
    """Counts the steps that a replay plays, and measures the progress that they make.

    One thread replays, and the publisher thread measures. A replay that hangs has an open step, and
    its stack is that of the replaying thread.
    """

    def __init__(self) -> None:
        self._engines: dict[int, _Steps] = {}
        self._hangs_since: float | None = None

    @property
    def unfinished(self) -> int:
        """Requests that are running or waiting in all engines."""
        return sum(steps.unfinished for steps in list(self._engines.values()))

    def end_step(self, engine: int, unfinished: int) -> None:
        """Count a step of ``engine``, which has left ``unfinished`` requests."""
        now = time.monotonic()
        steps = self._engines.get(engine)
        if steps is None:
            meter = ProgressMeter(engine, threading.get_ident())
            steps = self._engines[engine] = _Steps(meter)
        elif steps.unfinished:
            steps.longest = max(steps.longest, now - steps.ended_at)
        steps.count += 1
        steps.unfinished, steps.ended_at = unfinished, now

    def finish(self) -> None:
        """Finish all requests, since the recording may have ended while some were running."""
        for steps in self._engines.values():
            steps.unfinished = 0

    def begin_hang(self) -> None:
        """Open a step that does not end."""
        self._hangs_since = time.monotonic()

    def end_hang(self) -> None:
        """Close the step, whose duration does not count."""
        for steps in self._engines.values():
            steps.ended_at = time.monotonic()
        self._hangs_since = None

    def measure(self, now: float) -> Sequence[EngineProgress]:
        """Return the progress of all engines at ``now``."""
        return [self._measure(steps, now) for steps in list(self._engines.values())]

    def _measure(self, steps: _Steps, now: float) -> EngineProgress:
        longest, steps.longest = steps.longest, 0.0
        opened_at = self._hangs_since if steps.unfinished else None
        reading = Reading(
            steps.unfinished, steps.count, opened_at, ended_at=steps.ended_at, longest=longest
        )
        return steps.meter.measure(reading, now)


class Replay:
    """A recording that is replayed to one exporter, once or repeatedly.

    Args:
        realtime: Whether to keep the recorded times; otherwise as fast as the exporter accepts.
        namespace: Prefix of all identities, which keeps live engines untouched.
        labels: Labels that all engines get, instead of the recording's labels of the same names.
        pace: Multiple of the recorded speed, in real time.
        longest_pause: Seconds to which longer pauses are shortened, in real time.
        steps: Counts the replayed steps, so that heartbeats report the engines' progress; None: they
            report none.
    """

    def __init__(
        self,
        path: Path,
        endpoint: str,
        *,
        realtime: bool,
        namespace: str,
        connect_timeout: float = CONNECT_TIMEOUT,
        labels: Mapping[str, str] = {},
        pace: float = 1.0,
        longest_pause: float = math.inf,
        steps: ReplayedSteps | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.connect_timeout = connect_timeout
        self.realtime = realtime
        self.pace = pace
        self.longest_pause = longest_pause
        self.steps = steps
        self.progress = Progress()
        self._round_number = secrets.randbits(32)
        self._began = 0.0
        """First recorded Unix time of a request; 0: there is none."""
        self._moved_by = 0
        """Seconds between the recorded Unix times and those of this round."""
        self._engines: dict[str, list[EngineInfo]] = {}
        self._records: list[Items] = []
        self._stepping: set[str] = set()
        """Streams of processes that run steps."""
        for record in _records(path, namespace):
            if isinstance(record, Items):
                self._add(path, record)
                continue
            self._engines[record.stream] = record.engines
            for engine in record.engines:
                engine.labels = {**engine.labels, **labels}
        if not self._records:
            raise ConfigError(f"{path}: the recording is empty")

    def _add(self, path: Path, record: Items) -> None:
        self._records.append(record)
        try:
            items = [DIALECTS.decode(raw) for raw in record.items]
        except WireError as error:
            raise ConfigError(f"{path}: an item cannot be read: {error}") from None
        if any(_unfinished(item) is not None for item in items):
            self._stepping.add(record.stream)
        for item in items:
            self._began = self._began or next((at for *_, at in _unix_times(item)), 0.0)

    def run(self, *, once: bool = True, stop: threading.Event | None = None) -> None:
        """Replay once, or repeatedly until ``stop`` is set.

        Raises:
            RunError: No exporter answers, or it does not accept the items.
        """
        self._stop = stop or threading.Event()
        streams = {name: self._publisher(name, infos) for name, infos in self._engines.items()}
        publishers = [*streams.values()]
        try:
            self._wait(lambda: self._stop.is_set() or all(p.connected for p in publishers))
            while not self._stop.is_set():
                self.wait_for_round()
                self._round(streams)
                self.progress.rounds += 1
                if once:
                    break
            self._wait(lambda: all(p.drained for p in publishers))
        finally:
            for publisher in publishers:
                publisher.close()
        dropped = sum(publisher.dropped for publisher in publishers)
        errors = sum(publisher.errors for publisher in publishers)
        if dropped or errors:
            raise RunError(f"replay lost {dropped} items; {errors} records could not be read")

    def fill(self, seconds: float) -> None:
        """Set the pace at which a round takes so many seconds, although its longest pauses are shortened.

        With all pauses at their longest it must take longer. Times of requests keep the recorded pace.
        """
        times = [record.at for record in self._records]
        gaps = [max(after - before, 0.0) for before, after in itertools.pairwise(times)]
        left, rest = seconds, sum(gaps)
        for gap in sorted(gaps, reverse=True):
            self.pace = rest / left
            if gap / self.pace <= self.longest_pause:
                break
            left, rest = left - self.longest_pause, rest - gap

    def wait_for_round(self) -> None:
        """Wait until the next round may begin; for subclasses."""

    def wait_for_record(self) -> float:
        """Wait until the next record may be replayed, and return the seconds; for subclasses."""
        return 0.0

    def _publisher(self, stream: str, engines: Sequence[EngineInfo]) -> Publisher:
        """Return a stream's publisher, which reports progress if the recorded process ran steps."""
        if self.steps is None or stream not in self._stepping:
            return Publisher(self.endpoint, stream, engines)
        for engine in engines:
            engine.role = CORE
        return Publisher(self.endpoint, stream, engines, progress=self.steps.measure)

    def _round(self, streams: Mapping[str, Publisher]) -> None:
        # A recording may begin long before its first item, which is due at once.
        due, before = time.monotonic(), math.inf
        self._round_number += 1
        # By whole seconds, a front end's and a core's time of one event still are equal to the last bit. A
        # round may be shorter than a second; its requests must not have the arrivals of the round before.
        self._moved_by = max(int(time.time() - self._began), self._moved_by + 1)
        publishers = [*streams.values()]
        for record in self._records:
            publisher = streams.get(record.stream)
            if publisher is None:
                continue
            for raw in record.items:
                if self.realtime:
                    due += min(max(record.at - before, 0.0) / self.pace, self.longest_pause)
                    before = record.at
                    self._stop.wait(max(due - time.monotonic(), 0.0))
                due += self.wait_for_record()
                if self._stop.is_set():
                    return
                self._wait(lambda: self._stop.is_set() or not any(map(_is_behind, publishers)))
                if any(p.refused for p in publishers):
                    raise RunError("another process feeds this stream at the same time")
                self._play(publisher, DIALECTS.decode(raw))
                self.progress.records += 1
        if self.steps is not None:
            self.steps.finish()

    def _play(self, publisher: Publisher, item: Item) -> None:
        if isinstance(item, RequestEvents | BlockEvents | CacheEvents | CacheLookups):
            # Each round is a new source: its request and block numbers restart.
            item.source = (item.source + self._round_number) % COUNT_LIMIT
        for part, name, at in [*_unix_times(item)] if self.realtime else ():
            setattr(part, name, at + self._moved_by)
        if not isinstance(item, RequestEvents):
            # Request events keep the monotonic clock of their recording throughout.
            item.stamp = time.monotonic()
        if isinstance(item, VllmStep | SglangStats | TritonStats):
            item.wall = time.time()
        publisher.push(item)
        unfinished = _unfinished(item)
        if unfinished is not None and self.steps is not None:
            self.steps.end_step(item.engine, unfinished)

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.connect_timeout
        while not done():
            if time.monotonic() > deadline:
                raise RunError(
                    f"no exporter answers at {self.endpoint}; is sidestep serve running there?"
                )
            time.sleep(0.002)


def _records(path: Path, namespace: str) -> list[StreamStart | Items]:
    found = list(read(path))
    for record in found:
        record.stream = printable(f"{namespace}/{record.stream}")
        for engine in record.engines if isinstance(record, StreamStart) else ():
            engine.id = printable(f"{namespace}/{engine.id}")
    return found


def _is_behind(publisher: Publisher) -> bool:
    """Return whether the exporter has to catch up first."""
    return publisher.queued > QUEUE_ITEMS // 2 or publisher.held_bytes > BACKLOG_BYTES


def _unfinished(item: Item) -> int | None:
    """Return the unfinished requests after the step that ``item`` reports; None: it reports none."""
    if isinstance(item, VllmStep) and item.scheduler is not None:
        return item.scheduler.num_running_reqs + item.scheduler.num_waiting_reqs
    if isinstance(item, SglangStats):
        queues = item.stats.num_running_reqs, item.stats.num_queue_reqs
        return sum(queue.total for queue in queues if queue is not None)
    return None


def _unix_times(item: Item) -> Iterator[tuple[object, str, float]]:
    """Yield the parts of an item that have Unix times of requests, the times' names, and the times."""
    parts: Sequence[object] = ()
    match item:
        case RequestEvents():
            parts = [item, *item.events]
        case SglangRequests():
            parts = item.ended
        case VllmStep():
            parts = [item.front_end]
    for part in parts:
        for name in UNIX_TIMES:
            if at := getattr(part, name, 0.0):
                yield part, name, at
