"""The HTTP API of Prometheus, as far as the checks need it."""

from __future__ import annotations

import json
import time
from http import HTTPStatus
from typing import Any

import aiohttp

from sidestep.web_client.fetch import DENIED, TIMEOUT, FetchError, explained, parse_address, refusal

RECENT = 3600.0
"""Seconds within which a metric has had samples."""


class RefusedError(Exception):
    """A request that Prometheus refuses; the text is its own, in one line."""


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

    async def get(self, path: str, **params: str) -> Any:
        """Return the data of an answer.

        Raises:
            FetchError: There is no answer, or it is none of Prometheus.
            RefusedError: Prometheus refuses the request.
        """
        timeout = aiohttp.ClientTimeout(TIMEOUT)
        url = f"{self._root}/{path}"
        with explained():
            async with self._session.get(url, timeout=timeout, params=params) as answer:
                text = await answer.text()
        if answer.status in DENIED:
            raise FetchError(refusal(answer.status))
        try:
            found = json.loads(text)
            if answer.status != HTTPStatus.OK:
                raise RefusedError(" ".join(str(found["error"]).split()))
            return found["data"]
        except (ValueError, KeyError, TypeError):
            raise FetchError(
                f"/api/v1/{path} is no answer of Prometheus ({refusal(answer.status)})"
            ) from None

    async def optional(self, path: str, **params: str) -> Any:
        """Return the data of an answer; an empty object if the server does not have it."""
        try:
            return await self.get(path, **params)
        except (FetchError, RefusedError):
            return {}

    async def query(self, text: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and values of an instant query; NaN for a histogram.

        Raises:
            FetchError: See ``get``.
            RefusedError: See ``get``.
        """
        data = await self.get("query", query=text)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [
            (one["metric"], float(one["value"][1] if "value" in one else "nan"))
            for one in data["result"]
        ]

    async def names(self) -> list[str]:
        """Return the names of all metrics of the last hour.

        Raises:
            FetchError: See ``get``.
            RefusedError: See ``get``.
        """
        start = f"{time.time() - RECENT:.0f}"
        found: list[str] = await self.get("label/__name__/values", start=start)
        return found
