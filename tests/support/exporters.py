"""Recorded runs, a running exporter, and waiting for a condition."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from sidestep.app.demo import recording
from sidestep.app.exporter import Exporter
from sidestep.app.run import running
from sidestep.config.settings import read

DATA = Path(__file__).parents[1] / "data"
MAIN_RUN = DATA / "vllm-0.32.rec.gz"
SPEC_RUN = DATA / "spec.rec.gz"
Start = Callable[..., AbstractAsyncContextManager[Exporter]]


def recorded_run(name: str) -> Path:
    """Return the recording of ``name``, in the tests' data or the package's."""
    path = DATA / f"{name}.rec.gz"
    return path if path.exists() else recording(path.name)


def page_of_engine(name: str) -> str:
    """Return the page that the real engine served after the run ``name``."""
    return gzip.decompress((DATA / f"{name}.txt.gz").read_bytes()).decode()


@asynccontextmanager
async def started(directory: Path, **flags: Any) -> AsyncIterator[Exporter]:
    """Run an exporter on a free port and an ipc path in ``directory``, with settings as keywords."""
    given: Mapping[str, Any] = {
        "web_listen_address": ("127.0.0.1:0",),
        "ingest_endpoint": (f"ipc://{directory}/ingest.ipc",),
        "log_stats_interval": "0",
        # This process also holds the memory of earlier tests.
        "limits_memory_soft": "0",
        "limits_memory_hard": "0",
        **flags,
    }
    async with running(Exporter(read(given, {}))) as exporter:
        yield exporter


async def until(
    condition: Callable[[], bool | Awaitable[bool]], timeout: float = 60.0, what: str = ""
) -> None:
    """Wait until ``condition`` holds."""
    try:
        async with asyncio.timeout(timeout):
            while True:
                holds = condition()
                if isinstance(holds, Awaitable):
                    # It polls another process.
                    if await holds:
                        return
                    await asyncio.sleep(0.05)
                elif holds:
                    return
                else:
                    await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {timeout:.0f} s: {what or condition}") from None
