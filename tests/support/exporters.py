"""An exporter in the test's own process, recorded runs, and waiting for conditions."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from sidestep.app import Exporter
from sidestep.cli import recording

DATA = Path(__file__).parents[1] / "data"


MAIN_RUN = recording()


SPEC_RUN = DATA / "iterations_spec.jsonl.gz"


PARALLEL_RUN = DATA / "iterations_dp.jsonl.gz"


LORA_RUN = DATA / "iterations_lora.jsonl.gz"


Start = Callable[..., AbstractAsyncContextManager[Exporter]]


def page_of_engine(name: str) -> str:
    """The page that the real engine served after the run of that name."""
    return gzip.decompress((DATA / f"{name}.txt.gz").read_bytes()).decode()


async def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Return when ``condition`` holds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)
