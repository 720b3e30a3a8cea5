"""Measurement of a time range of a Prometheus, from the engines' own families."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from itertools import chain, pairwise
from typing import NamedTuple
from urllib.parse import urlencode

import aiohttp
import msgspec

from sidestep.catalog.engine_pages import PAGES, EnginePage, Match
from sidestep.errors import ConfigError
from sidestep_tools.compare.measurement import MAX_BLOCKS, Buckets, Measurement, Ratio
from sidestep_tools.compare.report import LIMIT, PART
from sidestep_tools.compare.source import Source
from sidestep_tools.web_client import fetch
from sidestep_tools.web_client.fetch import FetchError

TIMEOUT = 30.0
SCRAPES = 4
"""Scrapes that a block has at least: ``increase()`` extrapolates from the first and the last of them."""
PARTS, LIMITS = "sidestep_request_part_seconds_total", "sidestep_step_limit_seconds_total"
Blocks = Mapping[tuple[str, ...], Sequence[float]]
"""A number for each block, by the values of labels."""


class _Series(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]]


class _Data(msgspec.Struct):
    result: list[_Series]


class _Answer(msgspec.Struct):
    data: _Data


def _matchers(labels: Iterable[tuple[str, str]]) -> str:
    return "".join(f"{label}={json.dumps(value)}," for label, value in labels)


class _Queries(NamedTuple):
    """Queries of the series that a source selects, at the end of each block of its range.

    Attributes:
        start: Begin of the range, a Unix time.
    """

    session: aiohttp.ClientSession
    root: str
    matchers: str
    start: float
    step: float
    blocks: int = 1

    def over(self, function: str, name: str, more: str = "") -> str:
        """Return a function of each block of the series of one name."""
        return f"{function}({name}{{{self.matchers}{more}}}[{self.step * 1000:.0f}ms])"

    async def run(self, query: str, *by: str) -> Blocks:
        first, last = self.start + self.step, self.start + self.step * self.blocks
        fields = {"query": query, "start": first, "end": last + self.step / 2, "step": self.step}
        url = f"{self.root}/api/v1/query_range?{urlencode(fields)}"
        answer = await fetch.fetch(self.session, url, TIMEOUT)
        if answer.status == HTTPStatus.NOT_FOUND:
            raise FetchError(f"HTTP 404: it is no Prometheus: there is no {self.root}/api/v1")
        if answer.status != HTTPStatus.OK:
            raise FetchError(f"{fetch.refusal(answer.status)} to the query {query}")
        try:
            result = msgspec.json.decode(answer.text, type=_Answer).data.result
        except msgspec.MsgspecError as error:
            raise FetchError(f"no answer of a Prometheus: {error}") from None
        found: dict[tuple[str, ...], Sequence[float]] = {}
        for series in result:
            values = [0.0] * self.blocks
            for time, value in series.values:
                place, number = round((time - self.start) / self.step) - 1, float(value)
                if 0 <= place < self.blocks and math.isfinite(number):
                    values[place] = number
            found[tuple(series.metric.get(label, "") for label in by)] = values
        return found

    async def increases(self, matches: Iterable[Match], *by: str) -> Blocks:
        """Return the increases by labels of the first of ``matches`` that has series.

        Matches whose own labels differ add up.
        """
        several = " or ".join(
            self.over("increase", match.name, _matchers(match.labels)) for match in matches
        )
        return await self.run(f"sum by ({','.join(by)}) ({several})", *by) if several else {}

    async def total(self, matches: Iterable[Match]) -> Sequence[float]:
        """Return the increases of the first of ``matches`` that has series; empty if none has."""
        return (await self.increases(matches)).get((), ())

    async def buckets(self, matches: Iterable[Match]) -> Buckets | None:
        """Return the first histogram that has buckets; None if none has."""
        found = await self.increases(matches, "le")
        columns = sorted((float(le), counts) for (le,), counts in found.items())
        if not columns or columns[-1][0] != math.inf:
            return None
        blocks = [
            # Extrapolated counts are no whole numbers: one may be below the one before.
            [max(b - a, 0.0) for a, b in pairwise((0.0, *cumulative))]
            for cumulative in zip(*(counts for _, counts in columns), strict=True)
        ]
        return Buckets([bound for bound, _ in columns[:-1]], blocks)


async def measure(session: aiohttp.ClientSession, source: Source) -> Measurement:
    """Return the measurement of a time range of a Prometheus.

    Raises:
        ConfigError: The range has no data, or those of several kinds of engines.
        FetchError: The server does not answer.
    """
    assert source.start is not None
    assert source.end is not None
    address = fetch.parse_address(source.place)
    start, span = source.start.timestamp(), (source.end - source.start).total_seconds()
    root = address.root + address.path.rstrip("/")
    whole = _Queries(session, root, _matchers(source.labels.items()), start, span)
    pages = {f"{page.histograms['e2e'][0]}_count": page for page in PAGES if page.histograms}
    series = whole.over("last_over_time", "", f"__name__=~{json.dumps('|'.join(pages))}")
    present = await whole.run(
        f"count by (__name__, model_name) ({series})", "__name__", "model_name"
    )
    kinds = sorted({name for name, _ in present} & pages.keys())
    titles = ", ".join(pages[kind].title for kind in kinds or pages)
    if not kinds:
        raise ConfigError(f"{source.text}: no data of {titles} in this range")
    if len(kinds) > 1:
        raise ConfigError(
            f"{source.text}: several kinds of engines ({titles}): select one, as in"
            f" '{source.place}{{model_name=\"m\"}}@START/END'"
        )
    scrapes = (await whole.run(f"max({whole.over('count_over_time', kinds[0])})")).get((), [0.0])
    blocks = min(int(scrapes[0]) // SCRAPES, MAX_BLOCKS)
    if blocks < 1:
        raise ConfigError(f"{source.text}: fewer than {SCRAPES} scrapes in this range")
    models = ", ".join(sorted({model for _, model in present} - {""}))
    queries = whole._replace(step=span / blocks, blocks=blocks)
    return await _measurement(queries, pages[kinds[0]], models)


async def _measurement(queries: _Queries, page: EnginePage, models: str) -> Measurement:
    # Other ranks repeat what rank 0 reports.
    ranks = "".join(f'{rank}=~"0?",' for rank in page.ranks)
    queries = queries._replace(matchers=queries.matchers + ranks)
    families = {**page.histograms, **{own: (name,) for own, name in page.lengths.items()}}
    ratios: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    distributions: dict[str, Buckets] = {}
    for own, names in families.items():
        bucket, total, count = (
            [Match(f"{name}_{part}") for name in names] for part in ("bucket", "sum", "count")
        )
        if (buckets := await queries.buckets(bucket)) is not None:
            distributions[own] = buckets
            ratios[own] = await queries.total(total), await queries.total(count)
    if "e2e" not in ratios:
        raise FetchError(f"no classic buckets of {page.histograms['e2e'][0]} in this range")
    generated, looked_up, hits, finished, aborted = [
        await queries.total(chain.from_iterable(page.counters.get(name, ())))
        for name in ("generation", "looked_up", "found", "finished", "aborted")
    ]
    seconds = [queries.step] * queries.blocks
    ratios |= {
        "request_rate": (finished, seconds),
        "concurrency": (ratios["e2e"][0], seconds),
        "hit_ratio": (hits, looked_up),
        "failed": (aborted, finished),
        "output_rate": (generated, seconds),
    }
    parts = await queries.increases([Match(PARTS)], "part", "limit")
    for labels, counts in parts.items():
        ratios[PART + ".".join(filter(None, labels))] = counts, finished
    limits = await queries.increases([Match(LIMITS)], "limit")
    busy = [*map(sum, zip(*limits.values(), strict=True))]
    for (limit,), counts in limits.items():
        ratios[LIMIT + limit] = counts, busy
    return Measurement(
        page.dialect,
        f"{models}, {sum(finished):.0f} requests in {sum(seconds):.0f} s",
        {
            name: Ratio(above, below, is_share=name == "failed")
            for name, (above, below) in ratios.items()
            if above and below
        },
        distributions,
    )
