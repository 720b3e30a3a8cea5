"""Measurement of a running exporter: the requests of the last ten minutes, one by one."""

from __future__ import annotations

from http import HTTPStatus

import aiohttp
import msgspec

from sidestep.errors import ConfigError
from sidestep_tools.compare.measurement import Measurement
from sidestep_tools.compare.records import Record, select
from sidestep_tools.compare.source import Source
from sidestep_tools.web_client import fetch
from sidestep_tools.web_client.fetch import FetchError

REQUESTS = "/api/v1/timeline"
TIMEOUT = 30.0


class _Ended(msgspec.Struct):
    requests: list[Record]


class _Timeline(msgspec.Struct):
    engines: list[_Ended]


async def measure(session: aiohttp.ClientSession, source: Source) -> Measurement:
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
    requests = [one for each in timeline.engines for one in each.requests]
    if not requests:
        raise ConfigError(
            f"{source.text}: no engine has reported a request that ended in the last ten minutes:"
            " engines without records of requests are compared by a Prometheus, URL@START/END"
        )
    return select(source, requests)
