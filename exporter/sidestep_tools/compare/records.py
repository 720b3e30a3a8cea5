"""Measurement of request records: of the request log, of a recording, or of a running exporter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path

import aiohttp
import msgspec

from sidestep.errors import ConfigError
from sidestep.tracking.requests.outcomes import FAILED
from sidestep_adapters.recording.format import MAGIC, MAX_LINE, opened
from sidestep_adapters.recording.requests import requests
from sidestep_tools.compare.measurement import Distribution, Measurement, Ratio, Values, chunks
from sidestep_tools.compare.report import PART
from sidestep_tools.compare.source import Source
from sidestep_tools.request_records import Record, read_log
from sidestep_tools.web_client import fetch
from sidestep_tools.web_client.fetch import FetchError

REQUESTS = "/api/v1/timeline"
TIMEOUT = 30.0
SELECTABLE = ("adapter", "dialect", "engine", "model", "tenant")
"""Fields of a record that labels of a source select by; a model is its ``model_name``, too."""


class _Ended(msgspec.Struct):
    requests: list[Record]


class _Timeline(msgspec.Struct):
    engines: list[_Ended]


def measure(source: Source) -> Measurement:
    """Return the measurement of a file of records, or of a recording."""
    return select(source, _records(Path(source.place)))


async def measure_exporter(session: aiohttp.ClientSession, source: Source) -> Measurement:
    """Return the measurement of the requests that an exporter keeps.

    Raises:
        ConfigError: There is nothing to measure, or there are several kinds of engines.
        FetchError: It does not answer, or has no timeline.
    """
    answer = await fetch.fetch(session, fetch.parse_address(source.place).root + REQUESTS, TIMEOUT)
    if answer.status == HTTPStatus.NOT_FOUND:
        raise FetchError(
            f"no exporter with {REQUESTS}: of a Prometheus give a time range, URL@START/END"
        )
    if answer.status != HTTPStatus.OK:
        raise FetchError(fetch.refusal(answer.status))
    try:
        timeline = msgspec.json.decode(answer.text, type=_Timeline)
    except msgspec.MsgspecError as error:
        raise FetchError(f"no answer of a sidestep exporter: {error}") from None
    ended = [one for each in timeline.engines for one in each.requests]
    if not ended:
        raise ConfigError(
            f"{source.text}: no engine has reported a request that ended in the last ten minutes:"
            " engines without records of requests are compared by a Prometheus, URL@START/END"
        )
    return select(source, ended)


def select(source: Source, records: Iterable[Record]) -> Measurement:
    """Return the measurement of the records that a source selects.

    Raises:
        ConfigError: There are none, or those of several kinds of engines.
    """
    wanted = {{"model_name": "model"}.get(name, name): v for name, v in source.labels.items()}
    if unknown := wanted.keys() - set(SELECTABLE):
        known = ", ".join(SELECTABLE)
        raise ConfigError(f"{source.text}: records have no label {min(unknown)}; they have {known}")
    found = {
        # The same record may be written twice.
        record.key: record
        for record in records
        if all(getattr(record, name) == value for name, value in wanted.items())
        and (source.start is None or source.start.timestamp() <= record.begin)
        and (source.end is None or record.begin < source.end.timestamp())
    }
    if not found:
        which = "such requests" if wanted or source.start else "requests"
        raise ConfigError(f"{source.text}: no {which}")
    dialects = sorted({record.dialect for record in found.values()})
    if len(dialects) > 1:
        raise ConfigError(
            f"{source.text}: requests of several kinds of engines ({', '.join(dialects)}): select"
            f" one, as in '{source.place}{{dialect={dialects[0]}}}'"
        )
    return measurement(sorted(found.values(), key=lambda record: record.begin))


def _records(path: Path) -> Iterator[Record]:
    with opened(path) as file:
        first = file.readline(MAX_LINE)
        if first == MAGIC:
            for made in requests(path):
                yield msgspec.convert(made, Record, from_attributes=True)
            return
        yield from read_log(path, file, first)


def measurement(records: Sequence[Record]) -> Measurement:
    """Return the measurement of records in the order of arrival."""
    groups = [*chunks(records)]
    served = [*chunks([*filter(_is_served, records)])]

    def ratio(
        part: Callable[[Record], float], whole: Callable[[Record], float] = lambda _: 1
    ) -> Ratio:
        return Ratio([sum(map(part, g)) for g in groups], [sum(map(whole, g)) for g in groups])

    def values(field: Callable[[Record], float | None]) -> Distribution:
        known = [[v for v in map(field, group) if v is not None] for group in served]
        return Values([group for group in known if group])

    arrivals = [*chunks([b.begin - a.begin for a, b in pairwise(records)])]
    begin = records[0].begin
    ended = sorted(records, key=lambda record: record.time)
    times = [begin, *(max(record.time.timestamp(), begin) for record in ended)]
    spans = [*chunks([end - start for start, end in pairwise(times)])]
    ends = [*chunks(ended)]

    def rate(part: Callable[[Record], float]) -> Ratio:
        return Ratio([sum(map(part, group)) for group in ends], [*map(sum, spans)])

    def part_of(name: str) -> Ratio:
        return ratio(lambda one: (one.parts or {}).get(name, 0.0), lambda one: bool(one.parts))

    parts = dict.fromkeys(part for record in records for part in record.parts or ())
    models = ", ".join(sorted({record.model for record in records if record.model}))
    return Measurement(
        records[0].dialect,
        f"{models}, {len(records)} requests in {times[-1] - begin:.0f} s",
        {
            "request_rate": Ratio([*map(len, arrivals)], [*map(sum, arrivals)]),
            "prompt_tokens": ratio(
                lambda one: one.prompt_tokens, lambda one: one.prompt_tokens > 0
            ),
            "output_tokens": ratio(lambda one: one.output_tokens * _is_served(one), _is_served),
            "hit_ratio": ratio(lambda one: one.cached_tokens, lambda one: one.prompt_tokens),
            "concurrency": rate(lambda one: one.e2e_seconds or 0.0),
            "failed": ratio(lambda one: not _is_served(one))._replace(is_share=True),
            "output_rate": rate(lambda one: one.output_tokens),
            **{PART + part: part_of(part) for part in parts},
        },
        {
            "ttft": values(lambda one: one.ttft_seconds),
            "request_itl": values(lambda one: one.mean_itl_seconds),
            "e2e": values(lambda one: one.e2e_seconds),
            "prompt_tokens": values(lambda one: one.prompt_tokens),
            "output_tokens": values(lambda one: one.output_tokens),
        },
    )


def _is_served(record: Record) -> bool:
    return record.reason not in FAILED
