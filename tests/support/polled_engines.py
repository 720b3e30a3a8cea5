"""Servers that an exporter polls: a llama.cpp as recorded, and a TensorRT-LLM that is constructed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from llama_servers import LlamaServer, llama_server, recorded, recording, response
from polled import Polled, page, polled
from trtllm_page import made_page

LOAD = "load"
"""The recording of llama.cpp: four slots, twelve clients, forty requests."""


class PolledEngines:
    """Both servers, whose counts grow while ``serve`` runs."""

    def __init__(self, llamacpp: LlamaServer, trtllm: Polled) -> None:
        self.llamacpp, self.trtllm = llamacpp, trtllm
        self._recorded = _as_processes()
        self.step(1)

    @property
    def flags(self) -> dict[str, dict[str, Any]]:
        """Settings of an exporter for each of them, by its name."""
        return {
            "llamacpp-0": {"engine": (f"llamacpp={self.llamacpp.url},interval=0.25",)},
            "trtllm-0": {"scrape": (f"{self.trtllm.url},interval=0.25",)},
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
        self.trtllm.says = page(made_page(times))


def _as_processes() -> Iterator[tuple[str, bytes]]:
    """Yield path and response of each recorded answer, from each repetition as from another process."""
    pages = recording(LOAD)["pages"]
    for process in itertools.count(1):
        for one in pages:
            if one["path"] == "/metrics":
                yield one["path"], response(one["body"], kind=one["type"], process=str(process))
            elif one["path"] in ("/slots", "/props"):
                yield one["path"], recorded(one)


@asynccontextmanager
async def polled_engines() -> AsyncIterator[PolledEngines]:
    """Run both servers."""
    async with llama_server() as llamacpp, polled(page("")) as trtllm:
        yield PolledEngines(llamacpp, trtllm)
