"""Timelines from an exporter's API, from files of request records, and from recordings."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from sidestep.engines.dialects import DIALECTS
from sidestep.engines.sglang.handlers import ended_request
from sidestep.engines.sglang.wire import SglangRequests
from sidestep.errors import ConfigError, RunError, WireError
from sidestep.protocol.limits import printable
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.request_events import Identity, RequestEvents
from sidestep.tracking.requests.inflight import Request
from sidestep.tracking.requests.machine import RequestTracker
from sidestep.tracking.requests.outcomes import EndedRequest, IterationShape
from sidestep_adapters.recording.format import (
    MAGIC,
    MAX_LINE,
    StreamStart,
    lines,
    opened,
    records,
)
from sidestep_tools.web_client.fetch import FetchError, fetch, parse_address, refusal
from sidestep_tools.why.analysis import CurvePoint, Row
from sidestep_tools.why.timeline import EngineTimeline, Record, Timeline

Form = TypeVar("Form")


class _Curve(msgspec.Struct, frozen=True):
    id: str
    curve: list[CurvePoint] = []


class _Curves(msgspec.Struct, frozen=True):
    engines: list[_Curve]


class _Live(msgspec.Struct, frozen=True):
    engines: list[Row]


class Exporter:
    """The API of an exporter.

    Raises:
        ConfigError: The URL is no address of a web server.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._root = parse_address(url).root

    async def timeline(self, minutes: int) -> Timeline:
        """Return the steps and requests of the last minutes.

        Raises:
            RunError: The exporter does not answer, or keeps none.
        """
        found = await self._read(f"/api/v1/timeline?minutes={minutes}", Timeline)
        if found is None:
            raise RunError(
                f"{self._root}: it has no timeline: it is no exporter, or runs with --web.disable-timeline"
            )
        return found

    async def curves(self) -> dict[str, list[CurvePoint]]:
        """Return the hit-ratio curves of the engines that have one."""
        found = await self._read("/api/v1/kv/curve", _Curves)
        return {} if found is None else {each.id: each.curve for each in found.engines}

    async def rows(self) -> dict[str, Row]:
        """Return the live numbers of the engines; empty without a live page."""
        found = await self._read("/api/v1/live", _Live)
        return {} if found is None else {row.id: row for row in found.engines}

    async def _read(self, path: str, form: type[Form]) -> Form | None:
        """Return the JSON at ``path``; None if there is none.

        Raises:
            RunError: The exporter does not answer, or refuses.
        """
        url = self._root + path
        try:
            answer = await fetch(self._session, url)
        except FetchError as error:
            raise RunError(f"{url}: {error}") from None
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        if answer.status != HTTPStatus.OK:
            raise RunError(f"{url}: {refusal(answer.status)}")
        try:
            return msgspec.json.decode(answer.text, type=form)
        except msgspec.MsgspecError:
            return None


def from_file(path: Path) -> Timeline:
    """Return the timeline of a file: records of requests, or a recording of ``sidestep record``.

    Raises:
        ConfigError: The file cannot be read, or is neither.
    """
    with opened(path) as file:
        first = file.readline(MAX_LINE)
        if first == MAGIC:
            recorded = _Recorded(path)
            for record in records(path, file, first):
                if isinstance(record, StreamStart):
                    recorded.start(record.stream, record.engines)
                    continue
                for raw in record.items:
                    recorded.apply(record.stream, raw)
            return recorded.timeline()
        engines: dict[str, EngineTimeline] = {}
        for number, line in enumerate(lines(path, file, first), start=1):
            if not line.strip():
                continue
            try:
                each = msgspec.json.decode(line, type=Record)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise ConfigError(
                    f"{path}: line {number} is no record of a request, nor is the file a recording of"
                    f" sidestep record: {error}"
                ) from None
            name = each.key.rsplit("/", 2)[0]
            if name not in engines:
                engines[name] = EngineTimeline(
                    id=name, engine=each.engine, model=each.model, dialect=each.dialect
                )
            engines[name].requests.append(each)
    return Timeline(engines=[*engines.values()])


class _Recorded:
    """The engines of a recording, whose request events are tracked as the exporter tracks them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._infos: dict[str, Mapping[int, EngineInfo]] = {}
        self._engines: dict[str, _Engine] = {}

    def start(self, stream: str, engines: list[EngineInfo]) -> None:
        """Note which engines a stream feeds."""
        self._infos[stream] = dict(enumerate(engines))

    def apply(self, stream: str, raw: msgspec.Raw) -> None:
        """Apply an item if it has request events."""
        try:
            item = DIALECTS.decode(raw)
            info = self._infos.get(stream, {}).get(getattr(item, "engine", -1))
            if isinstance(item, RequestEvents | SglangRequests) and info is not None:
                if info.id not in self._engines:
                    self._engines[info.id] = _Engine(info)
                self._engines[info.id].apply(item)
        except WireError as error:
            raise ConfigError(f"{self._path}: damaged: {printable(error)}") from None

    def timeline(self) -> Timeline:
        """Return what was recorded."""
        if not self._engines:
            raise ConfigError(
                f"{self._path}: the recording has no requests: vLLM needs the tap or the plugin's"
                " events, SGLang the plugin"
            )
        return Timeline(engines=[engine.timeline for engine in self._engines.values()])


class _Engine:
    """One engine of a recording: a receiver of the requests that end.

    Attributes:
        needs_gaps: No longest gaps are shown.
    """

    needs_gaps = False

    def __init__(self, info: EngineInfo) -> None:
        labels = info.labels
        self.timeline = EngineTimeline(
            id=info.id,
            engine=labels.get("engine", info.id),
            model=labels.get("model_name", ""),
            dialect=info.dialect,
        )
        self._tracker = RequestTracker(sink=self)

    def apply(self, item: RequestEvents | SglangRequests) -> None:
        """Apply request events, or requests that ended."""
        if isinstance(item, SglangRequests):
            for each in item.ended:
                self.end(ended_request(each, item.source))
            return
        columns = self.timeline.steps
        for step in self._tracker.apply(item).steps:
            _append(columns, step)

    def tenant(self, identity: Identity | None, adapter: str) -> str:
        """Return no tenant."""
        del identity, adapter
        return ""

    def end(self, ended: EndedRequest) -> None:
        """Add a request that ended."""
        if ended.request is not None and ended.wall is not None:
            self.timeline.requests.append(_record(self.timeline, ended, ended.request, ended.wall))

    def lose(self, count: int) -> None:
        """Leave out requests that ended unseen."""


def _append(steps: object, step: IterationShape) -> None:
    for name in ("prefill_requests", "prefill_tokens", "decode_requests", "decode_tokens"):
        getattr(steps, name).append(getattr(step, name))
    numbers = {
        "end": step.wall,
        "seconds": step.duration,
        "limit": -1 if step.limit is None else step.limit,
    }
    for name, number in numbers.items():
        getattr(steps, name).append(number)


def _record(engine: EngineTimeline, ended: EndedRequest, request: Request, wall: float) -> Record:
    """Return the record of a request, as the exporter makes it."""

    def between(start: float | None, end: float | None) -> float | None:
        return None if start is None or end is None or end < start else end - start

    queued, arrival = request.queued, request.arrival
    return Record(
        key=f"{engine.id}/{ended.source:x}/{ended.number}",
        time=_utc(wall),
        engine=engine.engine,
        id="" if request.identity is None else request.identity.id,
        reason=ended.reason,
        arrival=None if arrival is None else _utc(arrival),
        queued=None if queued is None else _utc(wall - (ended.stamp - queued)),
        e2e_seconds=between(arrival, wall),
        queue_seconds=between(queued, request.scheduled),
        prefill_seconds=between(request.scheduled, request.first),
        decode_seconds=between(request.first, request.last),
        ttft_seconds=request.ttft,
        preempted_seconds=request.preempted_seconds,
        preempted_at=[(at - (queued or at), length) for at, length in request.pauses],
        preemptions=max(ended.preemptions, request.preemptions),
        prompt_tokens=ended.prompt_tokens or request.prompt_tokens,
        cached_tokens=request.cached,
        output_tokens=request.tokens or ended.generation_tokens,
        parts=ended.parts,
    )


def _utc(time: float) -> datetime:
    return datetime.fromtimestamp(time, timezone.utc)
