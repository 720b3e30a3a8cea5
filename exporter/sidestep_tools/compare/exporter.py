"""Measurement of a running exporter: the requests of the last ten minutes, or their histograms.

Only engines that send events of requests have requests there; the others have histograms.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from itertools import pairwise
from operator import add, mul
from typing import TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from sidestep.catalog.engine_pages import PAGES
from sidestep.errors import ConfigError
from sidestep_tools.compare.measurement import Buckets, Measurement, Ratio, chunks
from sidestep_tools.compare.records import Record, select
from sidestep_tools.compare.source import Source
from sidestep_tools.web_client import fetch
from sidestep_tools.web_client.fetch import FetchError

REQUESTS, LIVE, HISTORY = "/api/v1/timeline", "/api/v1/live", "/api/v1/live/history"
TIMEOUT = 30.0
INTERVAL = 5.0
"""Seconds of the first interval, whose beginning the history does not have."""
HAVE_LATENCIES = frozenset(page.dialect for page in PAGES if page.histograms)
T = TypeVar("T")


class _Ended(msgspec.Struct):
    requests: list[Record]


class _Timeline(msgspec.Struct):
    engines: list[_Ended]


class _Engine(msgspec.Struct):
    id: str
    engine: str
    dialect: str


class _Live(msgspec.Struct):
    engines: list[_Engine]


class _HeatMap(msgspec.Struct):
    name: str
    bounds: list[float]
    counts: list[list[int]]


class _History(msgspec.Struct):
    times: list[float]
    series: dict[str, list[float | None]]
    heatmaps: list[_HeatMap]


async def measure(session: aiohttp.ClientSession, source: Source) -> Measurement:
    """Return the measurement of an exporter's engines.

    Raises:
        ConfigError: There is nothing to measure, or there are several kinds of engines.
        FetchError: It does not answer, or is no exporter.
    """
    root = fetch.parse_address(source.place).root
    timeline = await _get(session, root + REQUESTS, _Timeline)
    if timeline is not None and any(each.requests for each in timeline.engines):
        return select(source, (one for each in timeline.engines for one in each.requests))
    live = await _get(session, root + LIVE, _Live)
    if live is None:
        raise FetchError("no sidestep exporter: of a Prometheus give a time range, URL@START/END")
    return await _from_histograms(session, source, root, live.engines)


async def _from_histograms(
    session: aiohttp.ClientSession, source: Source, root: str, found: Sequence[_Engine]
) -> Measurement:
    """Return the measurement of all engines, or of the one that a label names."""
    name = source.labels.get("engine")
    if source.labels.keys() - {"engine"}:
        raise ConfigError(f"{source.text}: its engines are selected by engine=NAME only")
    engines = [
        each
        for each in found
        if each.dialect in HAVE_LATENCIES and name in (None, each.engine, each.id)
    ]
    if not engines:
        which = "engine" if name is None else "such engine"
        raise ConfigError(f"{source.text}: no {which} that reports latencies")
    kinds = {each.dialect: each.engine for each in engines}
    if len(kinds) > 1:
        raise ConfigError(
            f"{source.text}: several kinds of engines ({', '.join(sorted(kinds))}): select one"
            f" engine, as in '{source.place}{{engine={engines[0].engine}}}'"
        )
    query = "" if name is None else f"?engine={quote(engines[0].id, safe='')}"
    history = await _get(session, root + HISTORY + query, _History)
    if history is None or not any(history.series.get("finished", ())):
        raise ConfigError(f"{source.text}: no request has ended in the last ten minutes")
    return measurement(engines[0].dialect, history)


async def _get(session: aiohttp.ClientSession, url: str, kind: type[T]) -> T | None:
    """Return the answer of ``url``; None if it has none."""
    answer = await fetch.fetch(session, url, TIMEOUT)
    if answer.status == HTTPStatus.NOT_FOUND:
        return None
    if answer.status != HTTPStatus.OK:
        raise FetchError(fetch.refusal(answer.status))
    try:
        return msgspec.json.decode(answer.text, type=kind)
    except msgspec.MsgspecError as error:
        raise FetchError(f"no answer of a sidestep exporter: {error}") from None


def measurement(dialect: str, history: _History) -> Measurement:
    """Return the measurement of a history, whose intervals are joined to blocks.

    Raises:
        ValueError: Its lists differ in length.
    """
    seconds = [INTERVAL, *(now - then for then, now in pairwise(history.times))]
    known = {
        name: [value or 0.0 for value, _ in zip(values, history.times, strict=True)]
        for name, values in history.series.items()
        if any(value is not None for value in values)
    }
    zeros = [0.0] * len(seconds)
    finished, hits = known.get("finished", zeros), known.get("prefix_hit_rate", zeros)
    generated, computed = (
        [*map(mul, known.get(f"{kind}_tokens_per_second", zeros), seconds)]
        for kind in ("generation", "prompt")
    )
    # Of a prompt, only the tokens that no cache had were computed.
    prompts = [
        tokens / (1 - hit) if hit < 1 else tokens
        for tokens, hit in zip(computed, hits, strict=True)
    ]
    present = [*map(add, known.get("running", zeros), known.get("waiting", zeros))]
    ratios = {
        "request_rate": ("finished", finished, seconds),
        "prompt_tokens": ("prompt_tokens_per_second", prompts, finished),
        "output_tokens": ("generation_tokens_per_second", generated, finished),
        "hit_ratio": ("prefix_hit_rate", [*map(mul, hits, prompts)], prompts),
        "concurrency": ("running", [*map(mul, present, seconds)], seconds),
        "failed": ("aborted", known.get("aborted", zeros), finished),
        "output_rate": ("generation_tokens_per_second", generated, seconds),
    }
    return Measurement(
        dialect,
        f"{sum(finished):.0f} requests in {sum(seconds):.0f} s",
        {
            name: Ratio(_sums(parts), _sums(wholes), is_share=name == "failed")
            for name, (series, parts, wholes) in ratios.items()
            if series in known
        },
        {
            each.name: Buckets(
                each.bounds,
                [[*map(sum, zip(*group, strict=True))] for group in chunks(each.counts)],
            )
            for each in history.heatmaps
        },
    )


def _sums(counts: Sequence[float]) -> list[float]:
    return [*map(sum, chunks(counts))]
