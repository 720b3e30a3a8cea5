"""Triton's API over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import quote

from sidestep.config.scrape_targets import Target
from sidestep.errors import PollError
from sidestep_adapters.polling.http_client import Client
from sidestep_adapters.triton import model_config as triton_config
from sidestep_adapters.triton import statistics as triton_statistics
from sidestep_adapters.triton.api import find_cause
from sidestep_adapters.triton.model_config import ModelConfig
from sidestep_adapters.triton.statistics import ModelVersion
from sidestep_adapters.triton.wire import ModelStats

JSON = "application/json"
MAX_BODY_BYTES = 8 << 20
"""Maximum bytes of statistics: decoding blocks the event loop, a millisecond for each MiB."""
MAX_SHORT_BYTES = 1 << 20
"""Maximum bytes of answers about one model, or of names only."""
CAUSES = (
    ("http_400", "", "unknown_model"),
    ("http_403", "", "restricted"),
    ("http_503", "not support", "unsupported"),
    ("http_503", "not ready", "not_ready"),
    ("truncated", "", "bad_answer"),
)
"""Cause of the HTTP client, a part of its text, and the cause that Triton means."""

T = TypeVar("T")


class HttpApi:
    """Implements ``api.ServerApi`` over HTTP.

    Args:
        target: The server's base URL without Triton's paths, its files and headers.
    """

    def __init__(self, target: Target) -> None:
        self._client = Client(target)
        self._url = target.url.rstrip("/")

    def check(self) -> None:
        """See ``ServerApi``."""
        self._client.check()

    async def close(self) -> None:
        """See ``ServerApi``."""
        await self._client.close()

    async def extensions(self) -> Sequence[str]:
        """See ``ServerApi``."""
        return await self._query("/v2", triton_config.decode_extensions, max_bytes=MAX_SHORT_BYTES)

    async def statistics(self, model: str = "", version: str = "") -> Sequence[bytes]:
        """See ``ServerApi``."""
        of_model = f"/{_quoted(model)}" if model else ""
        of_version = f"/versions/{version}" if version else ""
        path = f"/v2/models{of_model}{of_version}/stats"
        return await self._query(path, triton_statistics.split)

    async def ready(self) -> Sequence[str]:
        """See ``ServerApi``."""
        path = "/v2/repository/index"
        return await self._query(
            path, triton_config.decode_ready, "POST", max_bytes=MAX_SHORT_BYTES
        )

    async def config(self, model: str) -> ModelConfig:
        """See ``ServerApi``."""
        path = f"/v2/models/{_quoted(model)}/config"
        return await self._query(path, triton_config.decode_config, max_bytes=MAX_SHORT_BYTES)

    def version_of(self, piece: bytes) -> ModelVersion:
        """See ``ServerApi``."""
        return triton_statistics.version_of(piece)

    def stats(self, piece: bytes, has_cache: bool) -> ModelStats:
        """See ``ServerApi``."""
        return triton_statistics.read(piece, has_cache=has_cache)

    async def _query(
        self,
        path: str,
        decode: Callable[[bytes], T],
        method: str = "GET",
        max_bytes: int = MAX_BODY_BYTES,
    ) -> T:
        try:
            chunks = await self._client.fetch(self._url + path, JSON, (JSON,), method)
        except PollError as error:
            cause = find_cause(CAUSES, error.cause, str(error))
            raise PollError(cause, str(error)) if cause else error from None
        if sum(map(len, chunks)) > max_bytes:
            raise PollError("bad_answer", f"more than {max_bytes >> 20} MiB")
        return decode(b"".join(chunks))


def _quoted(model: str) -> str:
    return quote(model, safe="")
