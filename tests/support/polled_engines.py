"""Servers that an exporter polls: a llama.cpp as recorded, and a TensorRT-LLM that is constructed."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from llama_servers import LlamaServer, llama_server, recorded, recording, response
from trtllm_servers import TrtllmServer, made_page, trtllm_server

LOAD = "load"
"""The recording of llama.cpp: four slots, twelve clients, forty requests."""
PAUSED_EVERY = 4
_COUNT = re.compile(r"^(\S+_(?:total|bucket|count|sum)\{.*\}) (\S+)$", re.MULTILINE)


class PolledEngines:
    """Both servers, whose counts grow while ``serve`` runs.

    Attributes:
        llamacpp: Serves the recorded pages, again and again, each time as another process.
        trtllm: Serves the constructed page, with made-up numbers, and iterations.
    """

    def __init__(self, llamacpp: LlamaServer, trtllm: TrtllmServer) -> None:
        self.llamacpp, self.trtllm = llamacpp, trtllm
        self._recorded = _as_processes()
        self._page = made_page()
        self._iterations = itertools.count(1)
        self.step(1)

    @property
    def flags(self) -> dict[str, dict[str, Any]]:
        """Settings of an exporter for each of them, by its name."""
        return {
            "llamacpp-0": {"engine": (f"llamacpp={self.llamacpp.url},interval=0.25",)},
            "trtllm-0": {"engine": (f"trtllm={self.trtllm.url},interval=0.25,iterations=true",)},
        }

    async def serve(self) -> None:
        """Count on every quarter of a second, until cancelled."""
        for times in itertools.count(2):
            self.step(times)
            await asyncio.sleep(0.25)

    def step(self, times: int) -> None:
        """Answer with the next recorded page, and with ``times`` the constructed counts."""
        path, answer = next(self._recorded)
        while path != "/metrics":
            self.llamacpp.answers[path] = answer
            path, answer = next(self._recorded)
        self.llamacpp.answers[path] = answer
        self.trtllm.serve(
            _COUNT.sub(lambda found: f"{found[1]} {float(found[2]) * times}", self._page)
        )
        number = next(self._iterations)
        # No other reader empties the list if the exporter is late.
        del self.trtllm.iterations[:-100]
        self.trtllm.iterations.append(_iteration(number))


def _as_processes() -> Iterator[tuple[str, bytes]]:
    """Yield path and response of each recorded answer, from each repetition as from another process."""
    pages = recording(LOAD)["pages"]
    for process in itertools.count(1):
        for page in pages:
            if page["path"] == "/metrics":
                yield page["path"], response(page["body"], kind=page["type"], process=str(process))
            elif page["path"] in ("/slots", "/props"):
                yield page["path"], recorded(page)


def _iteration(number: int) -> dict[str, Any]:
    """Return the statistics of an iteration; in one of a few, requests are suspended."""
    return {
        "iter": number,
        "iterLatencyMS": 20.0,
        "numActiveRequests": 3,
        "numQueuedRequests": 1,
        "maxNumActiveRequests": 8,
        "kvCacheStats": {"maxNumBlocks": 100, "usedNumBlocks": 25, "cacheHitRate": 0.5},
        "inflightBatchingStats": {"numScheduledRequests": 2, "numCtxTokens": 64},
        "iterSuspendedRequests": int(number % PAUSED_EVERY == 0),
    }


@asynccontextmanager
async def polled_engines() -> AsyncIterator[PolledEngines]:
    """Run both servers."""
    async with llama_server() as llamacpp, trtllm_server() as trtllm:
        yield PolledEngines(llamacpp, trtllm)
