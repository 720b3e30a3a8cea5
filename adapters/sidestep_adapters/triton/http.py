"""Triton's API over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import quote

from sidestep.engines.triton.wire import ModelStats
from sidestep.errors import PollError, WireError
from sidestep_adapters.scrape.http_client import Client
from sidestep_adapters.triton import model_config as triton_config
from sidestep_adapters.triton import statistics as triton_statistics
from sidestep_adapters.triton.model_config import ModelConfig
from sidestep_adapters.triton.server import detail
from sidestep_adapters.triton.statistics import ModelVersion

JSON = "application/json"
MAX_BODY_BYTES = 8 << 20
"""Maximum bytes of statistics: decoding blocks the event loop, a millisecond for each MiB."""
MAX_SHORT_BYTES = 1 << 20
"""Maximum bytes of answers about one model, or of names only."""

T = TypeVar("T")


class HttpServer:
    """Implements ``server.Server`` over HTTP.

    Args:
        client: HTTP client of the server.
        url: The server's base URL, without Triton's paths.
    """

    def __init__(self, client: Client, url: str) -> None:
        self._client = client
        self._url = url.rstrip("/")

    async def extensions(self) -> Sequence[str]:
        """See ``Server``."""
        return await self._query("/v2", triton_config.extensions, max_bytes=MAX_SHORT_BYTES)

    async def statistics(self, model: str = "") -> Sequence[bytes]:
        """See ``Server``."""
        path = f"/v2/models/{_quoted(model)}/stats" if model else "/v2/models/stats"
        return await self._query(path, triton_statistics.split)

    async def ready(self) -> Sequence[str]:
        """See ``Server``."""
        path = "/v2/repository/index"
        return await self._query(path, triton_config.ready, "POST", max_bytes=MAX_SHORT_BYTES)

    async def config(self, model: str) -> ModelConfig:
        """See ``Server``."""
        path = f"/v2/models/{_quoted(model)}/config"
        return await self._query(path, triton_config.config, max_bytes=MAX_SHORT_BYTES)

    def version_of(self, piece: bytes) -> ModelVersion:
        """See ``Server``."""
        return triton_statistics.version_of(piece)

    def stats(self, piece: bytes, has_cache: bool) -> ModelStats:
        """See ``Server``."""
        return triton_statistics.translate(triton_statistics.read(piece), has_cache=has_cache)

    async def _query(
        self,
        path: str,
        read: Callable[[bytes], T],
        method: str = "GET",
        max_bytes: int = MAX_BODY_BYTES,
    ) -> T:
        try:
            answer = await self._client.fetch(self._url + path, JSON, (JSON,), method)
        except PollError as error:
            raise _to_triton_error(error) from None
        if sum(map(len, answer.chunks)) > max_bytes:
            raise PollError("bad_answer", f"more than {max_bytes >> 20} MiB")
        try:
            return read(answer.body)
        except WireError as error:
            raise PollError("bad_answer", detail(error)) from None


def _quoted(model: str) -> str:
    return quote(model, safe="")


def _to_triton_error(error: PollError) -> PollError:
    """Return ``error`` with the cause that Triton means."""
    cause, detail = error.cause, str(error)
    if cause == "http_400":
        cause = "unknown_model"
    elif cause == "http_403":
        cause = "restricted"
    elif cause == "http_503" and "not support" in detail:
        cause = "unsupported"
    elif cause == "http_503" and "not ready" in detail:
        cause = "not_ready"
    elif cause == "truncated":
        cause = "bad_answer"
    return error if cause == error.cause else PollError(cause, detail)
