"""Measurement of a running exporter: the last ten minutes of its engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from sidestep.errors import ConfigError
from sidestep_tools.compare.measurement import Buckets, Measurement, Ratio, chunks
from sidestep_tools.compare.source import Source
from sidestep_tools.web_client import fetch
from sidestep_tools.web_client.fetch import FetchError

LIVE, HISTORY = "/api/v1/live", "/api/v1/live/history"
BLOCKS = 40
INTERVAL = 5.0
"""Seconds of the first interval, whose beginning the history does not have."""
LATENCIES = {"ttft": "ttft", "inter_token": "itl", "e2e": "e2e"}
"""Names of quantities by those of heat maps."""


class _Row(msgspec.Struct):
    id: str
    engine: str
    model: str
    dialect: str
    ttft: dict[str, float] | None = None
    finished: float | None = None


class _Live(msgspec.Struct):
    engines: list[_Row]


class _HeatMap(msgspec.Struct):
    name: str
    bounds: list[float]
    counts: list[list[int]]


class _History(msgspec.Struct):
    times: list[float]
    series: dict[str, list[float | None]]
    heatmaps: list[_HeatMap]


async def measure(session: aiohttp.ClientSession, source: Source) -> Measurement:
    """Return the measurement of the engines that a source selects.

    Raises:
        ConfigError: It is no exporter, or the engines are none or of several kinds.
        FetchError: It does not answer.
    """
    root = fetch.parse_address(source.place).root
    rows = (await _get(session, root + LIVE, _Live)).engines
    serving = [row for row in rows if row.finished or row.ttft]
    chosen = [
        row
        for row in serving
        if all(value in _labels(row).get(name, ()) for name, value in source.labels.items())
    ]
    if not chosen:
        raise ConfigError(f"{source.text}: no such engine has served a request in the last minute")
    dialects = sorted({row.dialect for row in chosen})
    if len(dialects) > 1:
        raise ConfigError(
            f"{source.text}: several kinds of engines ({', '.join(dialects)}): select one, as in"
            f" '{source.place}{{engine=\"{chosen[0].engine}\"}}'"
        )
    if source.labels and len(chosen) > 1:
        raise ConfigError(f"{source.text}: {len(chosen)} engines: select one, or give no labels")
    query = f"?engine={quote(chosen[0].id, safe='')}" if source.labels else ""
    history = await _get(session, root + HISTORY + query, _History)
    if not history.times:
        raise ConfigError(f"{source.text}: the exporter has just started: ask in ten seconds")
    return measurement(dialects[0], history)


def _labels(row: _Row) -> Mapping[str, tuple[str, ...]]:
    return {
        "engine": (row.engine, row.id),
        "model": (row.model,),
        "model_name": (row.model,),
        "dialect": (row.dialect,),
    }


async def _get(session: aiohttp.ClientSession, url: str, type_: type[Any]) -> Any:
    answer = await fetch.fetch(session, url)
    if answer.status == HTTPStatus.NOT_FOUND:
        raise FetchError("no sidestep exporter: of a Prometheus give a time range, URL@START/END")
    if answer.status != HTTPStatus.OK:
        raise FetchError(fetch.refusal(answer.status))
    try:
        return msgspec.json.decode(answer.text, type=type_)
    except msgspec.MsgspecError as error:
        raise FetchError(f"no answer of a sidestep exporter: {error}") from None


def measurement(dialect: str, history: _History) -> Measurement:
    """Return the measurement of a history, whose intervals are joined to blocks."""
    times = history.times
    seconds = [INTERVAL, *(now - then for then, now in pairwise(times))]

    def counted(name: str) -> list[float]:
        return [value or 0.0 for value in history.series.get(name, [])]

    def rated(name: str) -> list[float]:
        return [value * span for value, span in zip(counted(name), seconds, strict=True)]

    finished, hits = counted("finished"), counted("prefix_hit_rate")
    # Of a prompt, only the tokens that no cache had were computed.
    prompts = [
        computed / (1 - hit) if hit < 1 else computed
        for computed, hit in zip(rated("prompt_tokens_per_second"), hits, strict=True)
    ]
    found = [hit * tokens for hit, tokens in zip(hits, prompts, strict=True)]
    generated = rated("generation_tokens_per_second")
    present = [a + b for a, b in zip(rated("running"), rated("waiting"), strict=True)]
    return Measurement(
        dialect,
        f"{sum(finished):.0f} requests in {sum(seconds):.0f} s",
        {
            "request_rate": _ratio(finished, seconds),
            "prompt_tokens": _ratio(prompts, finished),
            "output_tokens": _ratio(generated, finished),
            "hit_ratio": _ratio(found, prompts),
            "concurrency": _ratio(present, seconds),
            "failed": _ratio(counted("aborted"), finished)._replace(is_share=True),
            "output_rate": _ratio(generated, seconds),
        },
        {
            LATENCIES[each.name]: Buckets(
                each.bounds,
                [[*map(sum, zip(*group, strict=True))] for group in chunks(each.counts, BLOCKS)],
            )
            for each in history.heatmaps
            if each.name in LATENCIES
        },
    )


def _ratio(parts: Sequence[float], wholes: Sequence[float]) -> Ratio:
    return Ratio(
        [*map(sum, chunks(parts, BLOCKS))],
        [*map(sum, chunks(wholes, BLOCKS))],
    )
