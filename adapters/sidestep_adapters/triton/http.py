"""Triton's HTTP API, as far as statistics need it, and advice about failed queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import quote

from sidestep.config.scrape_targets import Target
from sidestep_adapters.polling.http_client import Client
from sidestep_adapters.triton.model_config import ModelConfig, decode_config
from sidestep_adapters.triton.statistics import split

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
"""Meanings, with Triton, of causes of the HTTP client."""
ADVICE: Mapping[str, str] = {
    "unreachable": "check that Triton runs, has loaded its models and listens there",
    "slow": "a model that is loaded over HTTP blocks Triton's HTTP port until it is loaded;"
    " no counts are lost meanwhile",
    "restricted": "set the header that the server expects, such as header.NAME=@/FILE",
    "unsupported": "the server was built with TRITON_ENABLE_STATS=OFF, which leaves statistics out",
    "not_ready": "the server is starting or stopping",
    "unknown_model": "the server does not have the model; one with --model-namespacing answers only"
    " for named models: set model=NAME for each",
    "unreadable": "every poll reads the file again",
    "http_401": "set the password, such as header.Authorization=@/FILE",
    "": "check that the URL is that of Triton's own HTTP port, by default 8000",
}
"""What to do about a failed query, by its cause; empty: any other."""

T = TypeVar("T")


class TritonApi:
    """One server's API.

    A query connects as needed, and may raise ``PollError``, whose cause is the poll's outcome.
    """

    def __init__(self, target: Target) -> None:
        self.client = Client(target, CAUSES)
        self._url = target.url.rstrip("/")

    async def statistics(self, model: str = "", version: str = "") -> Sequence[bytes]:
        """Return an undecoded piece for each ready version of all models or of one, or for one version."""
        of_model = f"/{quote(model, safe='')}" if model else ""
        of_version = f"/versions/{version}" if version else ""
        return await self._query(f"/v2/models{of_model}{of_version}/stats", split)

    async def config(self, model: str) -> ModelConfig:
        """Return the configuration of one model."""
        path = f"/v2/models/{quote(model, safe='')}/config"
        return await self._query(path, decode_config, max_bytes=MAX_SHORT_BYTES)

    async def _query(
        self, path: str, decode: Callable[[bytes], T], max_bytes: int = MAX_BODY_BYTES
    ) -> T:
        response = await self.client.request(self._url + path, JSON, (JSON,), max_bytes)
        return decode(b"".join(response.chunks))
