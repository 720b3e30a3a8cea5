"""The HTTP API of Prometheus, as far as the checks need it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import aiohttp

from sidestep_tools.web_client.fetch import (
    DENIED,
    TIMEOUT,
    FetchError,
    explained,
    parse_address,
    refusal,
)

RECENT = 3600.0
"""Seconds within which a metric has had samples."""


QUERY_TIMEOUT = 30.0
"""Seconds that a query of a dashboard may take."""


class RefusedError(Exception):
    """A request that Prometheus refuses; the text is its own, in one line.

    Attributes:
        is_syntax: Whether the query cannot be read.
    """

    def __init__(self, text: str, *, is_syntax: bool) -> None:
        super().__init__(" ".join(text.split()))
        self.is_syntax = is_syntax


class Api:
    """The API of one server.

    Args:
        url: Its address, with the prefix of its paths if it has one.

    Raises:
        ConfigError: It is no address of a web server.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        address = parse_address(url)
        self._session = session
        self._root = f"{address.root}{address.path.rstrip('/')}/api/v1"

    async def get(self, path: str, params: Mapping[str, str] = {}, timeout: float = TIMEOUT) -> Any:
        """Return the data of an answer.

        Raises:
            FetchError: There is no answer, or it is none of Prometheus.
            RefusedError: Prometheus refuses the request.
        """
        url, limit = f"{self._root}/{path}", aiohttp.ClientTimeout(timeout)
        with explained(timeout):
            async with self._session.get(url, timeout=limit, params=params) as answer:
                text = await answer.text()
        if answer.status in DENIED:
            raise FetchError(refusal(answer.status))
        try:
            found = json.loads(text)
            if answer.status != HTTPStatus.OK:
                raise RefusedError(found["error"], is_syntax=found["errorType"] == "bad_data")
            return found["data"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FetchError(
                f"/api/v1/{path} is no answer of Prometheus ({refusal(answer.status)})"
            ) from None

    async def optional(self, path: str, params: Mapping[str, str] = {}) -> Any:
        """Return the data of an answer; an empty object if the server does not have it."""
        try:
            return await self.get(path, params)
        except (FetchError, RefusedError):
            return {}

    async def query(
        self, text: str, timeout: float = TIMEOUT
    ) -> list[tuple[dict[str, str], float]]:
        """Return labels and values of an instant query; NaN for a histogram.

        Raises:
            FetchError: See ``get``.
            RefusedError: See ``get``.
        """
        data = await self.get("query", {"query": text}, timeout)
        try:
            if data["resultType"] in ("scalar", "string"):
                return [({}, float(data["result"][1]))]
            return [
                (one["metric"], float(one["value"][1] if "value" in one else "nan"))
                for one in data["result"]
            ]
        except (ValueError, KeyError, TypeError):
            raise FetchError("/api/v1/query is no answer of Prometheus") from None

    async def names(self) -> list[str]:
        """Return the names of all metrics of the last hour.

        Raises:
            FetchError: See ``get``.
            RefusedError: See ``get``.
        """
        start = f"{time.time() - RECENT:.0f}"
        found: list[str] = await self.get("label/__name__/values", {"start": start})
        return found
