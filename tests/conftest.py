"""Fixtures: a running exporter, and recorded pages of real engines."""

from __future__ import annotations

import asyncio
import gzip
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from sidestep.app import Exporter
from sidestep.cli import recording
from sidestep.config.settings import read

# Time limits per example would measure the machine; in CI every run tries the same examples.
settings.register_profile("sidestep", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("sidestep")

DATA = Path(__file__).parent / "data"
MAIN_RUN = recording()
SPEC_RUN = DATA / "iterations_spec.jsonl.gz"
PARALLEL_RUN = DATA / "iterations_dp.jsonl.gz"
LORA_RUN = DATA / "iterations_lora.jsonl.gz"

Start = Callable[..., AbstractAsyncContextManager[Exporter]]


def page_of_engine(name: str) -> str:
    """The page that the real engine served after the run of that name."""
    return gzip.decompress((DATA / f"{name}.txt.gz").read_bytes()).decode()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``make golden`` writes the pages that are otherwise compared."""
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a page with the one kept under this name, byte by byte."""

    def compare(name: str, page: str) -> None:
        kept = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            kept.write_text(page)
        assert page == kept.read_text()

    return compare


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts an exporter on a free port and an ipc path of its own; settings as flags."""

    @asynccontextmanager
    async def run(**flags: Any) -> AsyncIterator[Exporter]:
        given: Mapping[str, Any] = {
            "web_listen_address": ("127.0.0.1:0",),
            "ingest_endpoint": (f"ipc://{tmp_path}/ingest.ipc",),
            "log_stats_interval": "0",
            # It is this process's memory, with all that tests have left in it.
            "limits_memory_soft": "0",
            "limits_memory_hard": "0",
            **flags,
        }
        async with Exporter(read(given, {})).running() as exporter:
            yield exporter

    return run


async def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Return when ``condition`` holds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)
