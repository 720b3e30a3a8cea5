"""Print the functions that a value passes on its way through the exporter, in order, with their files.

``python -m tools.walks`` follows a frame to its series, a scrape to its bytes, and ended requests to
their records and spans, in an exporter of this process. Each has run once before, so that caches are filled.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from aiohttp import web

from sidestep.app.demo import recording
from sidestep.app.exporter import Exporter
from sidestep.app.run import running
from sidestep.config.settings import read
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import VllmStep
from sidestep.exposition.pages import CACHE_SECONDS
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import Batch, EngineInfo, FromSender, Heartbeat, Hello, encode
from sidestep_adapters.recording.replay import Replay

PACKAGE = str(Path(__file__).parents[1] / "exporter" / "sidestep") + "/"
INGEST, PERIODIC = {"Ingest._turn"}, {"Ingest._drain", "Ingest._on_tick"}
RECORD = {"ended", "EngineRequests.end", "RecordOutput._write_all"}
"""Functions that make an ended request, queue its record, and write it or send its span."""
PATIENCE = 60.0


class Active(threading.local):
    """How many functions run in a thread of those to look below, and of those to leave out."""

    below = 0
    without = 0


class Profile:
    """Record the exporter's functions that run, in all threads that start from now on."""

    def __init__(self) -> None:
        self._found: dict[CodeType, None] | None = None
        self._below: set[str] = set()
        self._without: set[str] = set()
        self._active = Active()
        self._package = PACKAGE
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
        if event not in ("call", "return") or not code.co_filename.startswith(self._package):
            return
        active, change = self._active, 1 if event == "call" else -1
        if code.co_qualname in self._below:
            active.below = max(active.below + change, 0)
        if code.co_qualname in self._without:
            active.without = max(active.without + change, 0)
        is_wanted = not active.without and (active.below or not self._below)
        # A comprehension or a lambda belongs to the function around it.
        if event == "call" and is_wanted and code.co_name[0] != "<" and self._found is not None:
            self._found[code] = None


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
    received: list[str] = []
    async with (
        _receiver(received) as flags["otlp_traces_endpoint"],
        running(Exporter(read(flags, {}))) as exporter,
        aiohttp.ClientSession() as client,
    ):
        url = exporter.url

        async def page() -> None:
            async with client.get(url) as answer:
                await answer.read()

        async with _connected(endpoint) as send:

            async def count(number: int) -> None:
                await send(step(number))
                await until(lambda: exporter.intake.items == number)

            labels = {"engine": "0", "model_name": "m"}
            await send(Hello(VERSION, "s", 1, 1, 1, [EngineInfo("e", "vllm", labels)]))
            await send(Heartbeat(1, 0, 0))
            await count(1)
            with profile.walk("A frame to its series", INGEST, {"Ingest.acknowledge"}):
                await count(2)
            await page()
            await count(3)
            # Scrapes share a page for a moment.
            await asyncio.sleep(2 * CACHE_SECONDS)
            with profile.walk("A scrape to its bytes", set(), PERIODIC, "exposition", "http"):
                await page()

        def replay(namespace: str) -> None:
            recorded = recording("vllm-aborts.rec.gz")
            Replay(
                recorded, endpoint, realtime=False, namespace=namespace, connect_timeout=PATIENCE
            ).run()

        await asyncio.to_thread(replay, "one")
        await until(lambda: bool(received))
        size, requests = log.stat().st_size, len(received)
        with profile.walk("An ended request to its record and span", RECORD, set()):
            await asyncio.to_thread(replay, "two")
            await until(lambda: log.stat().st_size > size and len(received) > requests)


@contextlib.asynccontextmanager
async def _receiver(received: list[str]) -> AsyncIterator[str]:
    """Run a receiver of OTLP that notes requests, and yield its URL."""

    async def accept(request: web.Request) -> web.Response:
        await request.read()
        received.append(request.path)
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/traces", accept)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    finally:
        await runner.cleanup()


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
