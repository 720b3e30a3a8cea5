"""Timelines from an exporter's API, from files of request records, and from recordings."""

from __future__ import annotations

import math
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from sidestep.errors import ConfigError, RunError
from sidestep_adapters.recording.format import MAGIC, MAX_LINE, opened
from sidestep_adapters.recording.requests import RecordedEngine, recorded_engines
from sidestep_tools.request_records import Record, read_log
from sidestep_tools.web_client.fetch import FetchError, fetch, parse_address, refusal
from sidestep_tools.why.analysis import Row
from sidestep_tools.why.evidence import CurvePoint
from sidestep_tools.why.timeline import EngineTimeline, Steps, Timeline

Form = TypeVar("Form")
TIMEOUT = 30.0
"""Seconds that an exporter has to answer: a timeline may be long."""


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
                f"{self._root}: it has no timeline that this release can read: give the address of a `sidestep"
                " serve` that runs without --web.disable-timeline"
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
        """Return the JSON at ``path``; None if there is none."""
        url = self._root + path
        try:
            answer = await fetch(self._session, url, TIMEOUT)
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
    engines: dict[str, EngineTimeline] = {}
    with opened(path) as file:
        first = file.readline(MAX_LINE)
        if first == MAGIC:
            return _recorded(path)
        for each in read_log(path, file, first):
            name = each.key.rsplit("/", 2)[0]
            if name not in engines:
                engines[name] = EngineTimeline(
                    id=name, engine=each.engine, model=each.model, dialect=each.dialect
                )
            engines[name].requests.append(each)
    if not engines:
        raise ConfigError(f"{path}: no requests")
    return Timeline(engines=[*engines.values()])


def _recorded(path: Path) -> Timeline:
    engines = [
        EngineTimeline(
            id=each.engine.id,
            engine=each.engine.name,
            model=each.engine.labels.get("model_name", ""),
            dialect=each.engine.layout.dialect,
            steps=_steps(each),
            requests=msgspec.convert(each.records, list[Record], from_attributes=True),
        )
        for each in recorded_engines(path)
    ]
    if not engines:
        raise ConfigError(
            f"{path}: the recording has no requests: vLLM needs the tap or the plugin's events, SGLang"
            " the plugin"
        )
    return Timeline(engines=engines)


def _steps(recorded: RecordedEngine) -> Steps:
    columns = {name: [*column] for name, column in recorded.steps._asdict().items()}
    columns["seconds"] = [None if math.isnan(each) else each for each in columns["seconds"]]
    return msgspec.convert(columns, Steps)
