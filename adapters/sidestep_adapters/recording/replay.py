"""Replay of a recording through the plugin's translation and a real socket."""

from __future__ import annotations

import dataclasses
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import Item
from sidestep.engines.sglang.wire import SglangStats
from sidestep.engines.vllm.wire import VllmStep
from sidestep.errors import ConfigError, RunError, WireError
from sidestep.protocol.block_events import BlockEvents, CacheEvents
from sidestep.protocol.cache_lookups import CacheLookups
from sidestep.protocol.limits import COUNT_LIMIT, printable
from sidestep.protocol.messages import CORE, EngineInfo
from sidestep.protocol.request_events import RequestEvents
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.publisher.queue import QUEUE_ITEMS
from sidestep_adapters.recording.format import (
    Call,
    Items,
    StreamStart,
    description_of,
    engines_of,
    read,
    to_objects,
)
from sidestep_adapters.recording.replayed_steps import ReplayedSteps
from sidestep_adapters.triton.wire import TritonStats
from sidestep_adapters.vllm.description import Description
from sidestep_adapters.vllm.stats import VllmTap

BACKLOG_BYTES = 2 << 20
"""Bytes in flight at which a replay without ``realtime`` pauses."""
CONNECT_TIMEOUT = 10.0
"""Default seconds to wait for the exporter to answer."""


@dataclasses.dataclass(slots=True)
class Progress:
    """Progress of a replay: replayed records, and complete rounds."""

    records: int = 0
    rounds: int = 0


class Replay:
    """A recording that is replayed to one exporter, once or repeatedly.

    Args:
        path: A recording in either format that ``recording.format`` reads.
        endpoint: The exporter's ingest endpoint.
        realtime: Whether to keep the recorded times; otherwise as fast as the exporter accepts.
        namespace: Prefix of all identities, which keeps live engines untouched.
        connect_timeout: Seconds to wait for the exporter to answer.
        labels: Labels of all engines that are added, or replace those of the recording.
        pace: Multiple of the recorded speed, in real time.
        longest_pause: Seconds to which longer pauses are shortened, in real time.
        steps: Counts the replayed steps, for heartbeats that report the engines' progress; without
            it they report none, as the recording has none.

    Raises:
        ConfigError: The file is not a recording.
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
        records = list(read(path))
        calls = [record for record in records if isinstance(record, Call)]
        frames = [record for record in records if not isinstance(record, Call)]
        self._player: _CallPlayer | _FramePlayer = (
            _CallPlayer(path, calls, namespace, labels, steps)
            if calls
            else _FramePlayer(path, frames, namespace, labels, steps)
        )

    def run(self, *, once: bool = True, stop: threading.Event | None = None) -> None:
        """Replay once, or repeatedly until ``stop`` is set.

        Raises:
            RunError: No exporter answers, or it does not accept the items.
        """
        self._stop = stop or threading.Event()
        publishers = self._player.open(self.endpoint)
        try:
            self._wait(lambda: all(p.connected for p in publishers))
            while not self._stop.is_set():
                self.wait_for_round()
                self._round(publishers)
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

    def wait_for_round(self) -> None:
        """Return when the next round may begin; for subclasses."""

    def wait_for_record(self) -> float:
        """Return when the next record may be replayed: the seconds waited; for subclasses."""
        return 0.0

    def _round(self, publishers: Sequence[Publisher]) -> None:
        # A recording may begin long before its first item, which is due at once.
        due, before = time.monotonic(), math.inf
        for at, play in self._player.steps():
            if self.realtime:
                due += min(max(at - before, 0.0) / self.pace, self.longest_pause)
                before = at
                self._stop.wait(max(due - time.monotonic(), 0.0))
            due += self.wait_for_record()
            if self._stop.is_set():
                return
            self._wait(
                lambda: (
                    self._stop.is_set()
                    or not any(
                        p.queued > QUEUE_ITEMS // 2 or p.held_bytes > BACKLOG_BYTES
                        for p in publishers
                    )
                )
            )
            if any(p.refused for p in publishers):
                raise RunError("another process feeds this stream at the same time")
            play()
            self.progress.records += 1
        if self.steps is not None:
            self.steps.finish()

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.connect_timeout
        while not done():
            if time.monotonic() > deadline:
                raise RunError(
                    f"no exporter answers at {self.endpoint}; is sidestep serve running there?"
                )
            time.sleep(0.002)


Step = tuple[float, Callable[[], None]]


class _CallPlayer:
    """Player of stat-logger calls: each recorded process becomes a front end."""

    def __init__(
        self,
        path: Path,
        calls: list[Call],
        namespace: str,
        labels: Mapping[str, str],
        steps: ReplayedSteps | None,
    ) -> None:
        self.calls = calls
        self._labels = labels
        self._steps = steps
        self._taps: dict[str, VllmTap] = {}
        self._descriptions: dict[str, Description] = {}
        for call in calls:
            if call.name == "__init__" and call.instance not in self._descriptions:
                self._descriptions[call.instance] = description_of(
                    call.fields, len(self._descriptions), namespace
                )
        for number, call in enumerate(calls, start=1):
            if call.instance not in self._descriptions:
                raise ConfigError(f"{path}: line {number}: no __init__ call of its process")
            try:
                numbers = (call.fields.get(name, 0) for name in ("engine_idx", "sleep", "level"))
                all(map(int, numbers))
            except (TypeError, ValueError, OverflowError) as error:
                raise ConfigError(f"{path}: line {number}: {error}") from None

    def open(self, endpoint: str) -> list[Publisher]:
        """Return one publisher for each recorded process, and make its tap."""
        publishers: list[Publisher] = []
        for instance, description in self._descriptions.items():
            engines = description.engine_infos
            _relabel(engines, self._labels)
            publisher = _publisher(endpoint, description.stream, engines, self._steps)
            publishers.append(publisher)
            tap = VllmTap(publisher.push, publisher.fail, description.engines)
            tap.record_sleep_state()
            self._taps[instance] = tap
        return publishers

    def steps(self) -> Iterator[Step]:
        """Yield every record in the order of the file."""
        for call in self.calls:
            play = self._play(self._taps[call.instance], call)
            if play is not None:
                yield call.at, play

    def _play(self, tap: VllmTap, call: Call) -> Callable[[], None] | None:
        fields = call.fields
        match call.name:
            case "record":
                scheduler, iteration, mm_cache = (
                    to_objects(fields.get(name))
                    for name in ("scheduler_stats", "iteration_stats", "mm_cache_stats")
                )
                engine = int(fields.get("engine_idx", 0))
                return partial(self._record, tap, scheduler, iteration, mm_cache, engine)
            case "record_sleep_state":
                sleep, level = int(fields.get("sleep", 0)), int(fields.get("level", 0))
                return lambda: tap.record_sleep_state(sleep, level)
            case "record_admission_rejection":
                reason = str(fields.get("reason", ""))
                return lambda: tap.record_admission_rejection(reason)
        return None

    def _record(
        self, tap: VllmTap, scheduler: Any, iteration: Any, mm_cache: Any, engine: int
    ) -> None:
        tap.record(scheduler, iteration, mm_cache, engine)
        if scheduler is not None and self._steps is not None:
            unfinished = int(scheduler.num_running_reqs) + int(scheduler.num_waiting_reqs)
            self._steps.end_step(engine, unfinished)


class _FramePlayer:
    """Player of sidestep's own recordings: items as they were sent, with the current time."""

    def __init__(
        self,
        path: Path,
        records: list[StreamStart | Items],
        namespace: str,
        labels: Mapping[str, str],
        steps: ReplayedSteps | None,
    ) -> None:
        self._labels = labels
        self._steps = steps
        self.records = [record for record in records if isinstance(record, Items)]
        self.engines = engines_of(records)
        self.namespace = namespace
        if not self.records:
            raise ConfigError(f"{path}: the recording is empty")
        self._publishers: dict[str, Publisher] = {}
        self._round = secrets.randbits(32)
        self._stepping: set[str] = set()
        """Streams of processes that run steps."""
        try:
            for record in self.records:
                for raw in record.items:
                    if _unfinished(DIALECTS.decode(raw)) is not None:
                        self._stepping.add(record.stream)
        except WireError as error:
            raise ConfigError(f"{path}: an item cannot be read: {error}") from None

    def open(self, endpoint: str) -> list[Publisher]:
        """Return one publisher for each recorded stream."""
        for stream, engines in self.engines.items():
            for engine in engines:
                engine.id = printable(f"{self.namespace}/{engine.id}")
            _relabel(engines, self._labels)
            name = printable(f"{self.namespace}/{stream}")
            steps = self._steps if stream in self._stepping else None
            self._publishers[stream] = _publisher(endpoint, name, engines, steps)
        return list(self._publishers.values())

    def steps(self) -> Iterator[Step]:
        """Yield every item in the order of the file."""
        self._round += 1
        for record in self.records:
            publisher = self._publishers.get(record.stream)
            if publisher is None:
                continue
            for raw in record.items:
                item = DIALECTS.decode(raw)
                if isinstance(item, RequestEvents | BlockEvents | CacheEvents | CacheLookups):
                    # Each round is a new source: its request and block numbers restart.
                    item.source = (item.source + self._round) % COUNT_LIMIT
                yield record.at, partial(self._play, publisher, item)

    def _play(self, publisher: Publisher, item: Item) -> None:
        _push(publisher, item)
        unfinished = _unfinished(item)
        if unfinished is not None and self._steps is not None:
            self._steps.end_step(item.engine, unfinished)


def _publisher(
    endpoint: str, stream: str, engines: Sequence[EngineInfo], steps: ReplayedSteps | None
) -> Publisher:
    """Return a publisher, of a process that runs steps if there are any to report."""
    if steps is None:
        return Publisher(endpoint, stream, engines)
    for engine in engines:
        engine.role = CORE
    return Publisher(endpoint, stream, engines, progress=steps.measure)


def _relabel(engines: Sequence[EngineInfo], labels: Mapping[str, str]) -> None:
    for engine in engines:
        engine.labels = {**engine.labels, **labels}


def _unfinished(item: Item) -> int | None:
    """Return the unfinished requests after the step that ``item`` reports; None: it reports none."""
    if isinstance(item, VllmStep) and item.scheduler is not None:
        return item.scheduler.num_running_reqs + item.scheduler.num_waiting_reqs
    if isinstance(item, SglangStats):
        queues = item.stats.num_running_reqs, item.stats.num_queue_reqs
        return sum(queue.total for queue in queues if queue is not None)
    return None


def _push(publisher: Publisher, item: Item) -> None:
    """Push ``item`` with the current time."""
    if not isinstance(item, RequestEvents):
        # Request events keep the clock of their recording throughout.
        item.stamp = time.monotonic()
    if isinstance(item, VllmStep | SglangStats | TritonStats):
        item.wall = time.time()
    publisher.push(item)
