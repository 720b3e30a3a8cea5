"""Print the functions that a value passes on its way through the exporter, in order, with their files.

``python -m tools.walks`` follows a frame to its series, a scrape to its bytes, and ended requests to
their records, in an exporter of this process. Each has run once before, so that caches are filled.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from sidestep.app import Exporter
from sidestep.config.settings import read
from sidestep.demo import recording
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import VllmStep
from sidestep.exposition.pages import CACHE_SECONDS
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import Batch, EngineInfo, FromSender, Heartbeat, Hello, encode

PACKAGE = str(Path(__file__).parents[1] / "exporter" / "sidestep") + "/"
INGEST, PERIODIC = {"Ingest._turn"}, {"Ingest._drain", "Ingest._on_tick"}
RECORD = {"ended", "RequestLog.add", "RecordWriter._run"}
"""Functions that make an ended request, queue it, and write its record."""
PATIENCE = 60.0


class Profile:
    """Record the exporter's functions that run, in all threads that start from now on."""

    def __init__(self) -> None:
        self._found: dict[CodeType, None] | None = None
        self._below: set[str] = set()
        self._without: set[str] = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @contextlib.contextmanager
    def walk(
        self, title: str, below: set[str], without: set[str], *packages: str
    ) -> Iterator[None]:
        """Print the functions that run in the block.

        Args:
            title: Heading.
            below: Print only functions of these names and those that they call; empty: all.
            without: Leave out these functions and those that they call.
            packages: Packages of the printed functions; by default all.
        """
        self._below, self._without, self._found = below, without, {}
        yield
        folders = tuple(f"{PACKAGE}{package}/" for package in packages) or (PACKAGE,)
        found = [code for code in self._found if code.co_filename.startswith(folders)]
        self._found = None
        files = {code.co_filename for code in found}
        print(f"\n{title}: {len(found)} functions in {len(files)} files")
        for code in found:
            print(f"  {code.co_filename.removeprefix(PACKAGE)}: {code.co_qualname}")

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        found = self._found
        if found is None or event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if code.co_name.startswith("<"):
            # A comprehension or a lambda belongs to the function around it.
            return
        callers = set()
        caller: FrameType | None = frame
        while caller is not None:
            callers.add(caller.f_code.co_qualname)
            caller = caller.f_back
        if not callers & self._without and (not self._below or callers & self._below):
            found[code] = None


async def until(holds: Callable[[], bool]) -> None:
    """Wait until ``holds`` returns True.

    Raises:
        TimeoutError: It returned False for ``PATIENCE`` seconds.
    """
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110 - what it waits for sets no event
            await asyncio.sleep(0.01)


def step(number: int) -> Batch:
    """Return a frame with one step of an engine."""
    stats = IterationStats(1, inter_token_latencies_iter=[0.01])
    item = VllmStep(0, float(number), float(number), None, stats)
    return Batch(1, number, [msgspec.Raw(encode_item(item))])


async def walks(profile: Profile, folder: Path) -> None:
    """Print all walks."""
    endpoint, log = f"ipc://{folder}/own/ingest", folder / "requests.jsonl"
    flags = {
        "web_listen_address": ("127.0.0.1:0",),
        "ingest_endpoint": (endpoint,),
        "log_stats_interval": "0",
        "requests_log": str(log),
    }
    async with Exporter(read(flags, {})).running() as exporter, aiohttp.ClientSession() as client:

        async def page() -> None:
            async with client.get(exporter.url) as answer:
                await answer.read()

        async with _connected(endpoint) as send:

            async def count(number: int) -> None:
                await send(step(number))
                await until(lambda: exporter.intake.items == number)

            labels = {"engine": "0", "model_name": "m"}
            await send(Hello(VERSION, "s", 1, 1, 1, [EngineInfo("e", "vllm", labels)]))
            await send(Heartbeat(1, 0, 0))
            await count(1)
            with profile.walk("A frame to its series", INGEST, set()):
                await count(2)
            await page()
            await count(3)
            # Scrapes share a page for a moment.
            await asyncio.sleep(2 * CACHE_SECONDS)
            with profile.walk("A scrape to its bytes", set(), PERIODIC, "exposition", "http"):
                await page()
        run = [sys.executable, "-m", "sidestep", "replay", "--connect", endpoint, "--speed", "max"]
        run += [str(recording("core_aborts.rec.gz")), "--namespace"]
        await asyncio.to_thread(subprocess.run, [*run, "one"], check=True, capture_output=True)
        size = log.stat().st_size
        with profile.walk("Ended requests to their records", RECORD, set()):
            await asyncio.to_thread(subprocess.run, [*run, "two"], check=True, capture_output=True)
            await until(lambda: log.stat().st_size > size)


@contextlib.asynccontextmanager
async def _connected(endpoint: str) -> AsyncIterator[Callable[[FromSender], Awaitable[Any]]]:
    """Connect, and yield a function that sends a message."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)

    def send(message: FromSender) -> Awaitable[Any]:
        return socket.send(encode(message))

    try:
        yield send
    finally:
        socket.close(linger=0)
        context.term()


def main() -> None:
    """Print all walks of an exporter in a temporary directory."""
    with tempfile.TemporaryDirectory() as made:
        asyncio.run(walks(Profile(), Path(made)))


if __name__ == "__main__":
    main()
