"""A trtllm-serve without a GPU: its answers are constructed, since none could be recorded."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from exporters import DATA
from polled import PLAIN, Polled, answer

PAGE, ITERATIONS, MODELS, EVENTS = (
    "/prometheus/metrics",
    "/metrics",
    "/v1/models",
    "/kv_cache_events",
)
JSON = "application/json"


def made_page() -> str:
    """Return the page that prometheus_client wrote of the families of a 1.4 pre-release, with made-up numbers."""
    return gzip.decompress((DATA / "trtllm" / "page_made.txt.gz").read_bytes()).decode()


def old_page(requests: int, model: str = "undefined") -> str:
    """Return a page of 1.2: five families, no prefix, and labels without a meaning."""
    labels = f'engine_type="undefined",model_name="{model}"'
    return (
        f'request_success_total{{{labels},finished_reason="stop"}} {requests}.0\n'
        f'time_to_first_token_seconds_bucket{{{labels},le="0.001"}} 0.0\n'
        f'time_to_first_token_seconds_bucket{{{labels},le="0.1"}} {requests}.0\n'
        f'time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} {requests}.0\n'
        f"time_to_first_token_seconds_count{{{labels}}} {requests}.0\n"
        f"time_to_first_token_seconds_sum{{{labels}}} {requests * 0.05}\n"
    )


class TrtllmServer:
    """A server whose answers a test sets.

    Attributes:
        answers: Body and media type, by path.
        iterations: Iteration statistics, which each read empties.
        events: KV cache events, likewise.
        http: The server behind it.
    """

    def __init__(self) -> None:
        self.answers: dict[str, tuple[str, str]] = {
            MODELS: (json.dumps({"data": [{"id": "Qwen3-8B"}]}), JSON)
        }
        self.iterations: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.http = Polled(self._says)

    async def _says(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = self.http.heads[-1].split(" ")[1]
        taken = {ITERATIONS: self.iterations, EVENTS: self.events}.get(path)
        if taken is not None:
            body = json.dumps(taken)
            taken.clear()
            writer.write(answer(body.encode(), kind=JSON))
        elif path in self.answers:
            text, kind = self.answers[path]
            writer.write(answer(text.encode(), kind=kind))
        else:
            writer.write(answer(b'{"detail":"Not Found"}', "404 Not Found", JSON))

    @property
    def url(self) -> str:
        """URL of the server."""
        return self.http.url

    @property
    def asked(self) -> Sequence[str]:
        """Paths of all requests so far."""
        return [head.split(" ")[1] for head in self.http.heads]

    def serve(self, page: str) -> None:
        """Answer with this page."""
        self.answers[PAGE] = page, PLAIN


@asynccontextmanager
async def trtllm_server(page: str | None = None) -> AsyncIterator[TrtllmServer]:
    """Run a server; without a page it was started without ``return_perf_metrics``."""
    server = TrtllmServer()
    if page is not None:
        server.serve(page)
    await server.http.start()
    try:
        yield server
    finally:
        await server.http.stop()
