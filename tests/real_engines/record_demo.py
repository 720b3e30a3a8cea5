"""A program that records the demo's runs of a real vLLM and SGLang again.

``PYTHONPATH=tests/support .venv/bin/python tests/real_engines/record_demo.py NAME...`` replaces the
recordings of these runs in ``exporter/sidestep/data``, or of all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import itertools
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from real_engines.comparison import idle, parse, value
from real_engines.conversations import conversations
from real_engines.load import Answer, Ask, Client
from real_engines.processes import ROOT, ExporterProcess, Server, VllmServer
from real_engines.sglang_server import SglangServer, interpreter
from real_engines.sites import TAP
from real_engines.tiny_model import make_adapter, make_model
from sidestep.app.demo import recording
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.vllm.wire import VllmSleep
from sidestep.protocol.self_described import Samples
from sidestep_adapters.recording.format import Items, Writer, read
from sidestep_adapters.recording.recorder import Tee

VLLM = ROOT / "build/vllm-venv/bin/python"
ADAPTERS = ("lora-a", "lora-b", "lora-c")
SETTLE = 10.0
"""Seconds for which the counts of an engine must stay the same: then all that it has sent is recorded."""
COUNTS = (
    "vllm:generation_tokens",
    "vllm:request_success",
    "sglang:generation_tokens",
    "sglang:num_requests",
)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Loads of one server by the names of their runs, one after the other, and the server's flags."""

    loads: Mapping[str, Callable[[Client], Awaitable[None]]]
    flags: str = ""
    engine: str = "vllm"


async def serve(
    client: Client, asks: Iterable[Ask], at_once: int, *, more: int = 1, served: int = 1 << 30
) -> None:
    """Send requests ``at_once``, and ``more`` as each ends; all clients leave once so many are ``served``."""
    left = iter(asks)
    tasks: set[asyncio.Task[Answer]] = set()

    def send(count: int) -> None:
        tasks.update(asyncio.create_task(client.ask(ask)) for ask in itertools.islice(left, count))

    send(at_once)
    while tasks and served > 0:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        tasks -= done
        served -= len(done)
        send(more * len(done))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # The engine says after a step that nobody is left.
    await client.ask(Ask(client.text(20), 2))


async def steady(client: Client) -> None:
    """Send a light load."""
    await serve(client, [Ask(client.text(1200 + 20 * n), 20 + n % 20) for n in range(30)], 2)


async def overload(client: Client) -> None:
    """Send three requests for each that ends."""
    await serve(client, [Ask(client.text(40), 40) for _ in range(250)], 12, more=3, served=70)


async def cache(client: Client) -> None:
    """Go on with conversations whose beginnings a larger cache would hold."""
    prompts = [prompt[:320] for prompt in conversations(110, 3, active=24)]
    await serve(client, [Ask(prompt, 60) for prompt in prompts], 16, served=90)


async def aborts(client: Client) -> None:
    """Send a light load of which every second client leaves."""
    await serve(
        client, [Ask(client.text(400 + 20 * n), 30, leave=10 * (n % 2)) for n in range(30)], 2
    )


async def lora(client: Client) -> None:
    """Send requests for three adapters in turn."""
    asks = [Ask(client.text(30), 40, model=ADAPTERS[n % 3]) for n in range(36)]
    await serve(client, asks, 12)


RUNS = (
    Runs({"vllm-hangs": steady, "vllm-aborts": aborts, "vllm-full": overload}, "--max-num-seqs 4"),
    Runs(
        {"vllm-lora": lora},
        "--enable-lora --max-loras 1 --max-lora-rank 8 --max-num-seqs 16",
    ),
    Runs({"vllm-cache": cache}, "--num-gpu-blocks-override 70 --max-num-seqs 16"),
    Runs({"sglang": steady}, "--max-running-requests 16", engine="sglang"),
)


def server(run: Runs, home: Path) -> Server:
    """Start a run's server, which sends to the recorder."""
    model = make_model(home / "tiny")
    environ = {"SIDESTEP_ENDPOINT": f"ipc://{home}/tee.ipc", "SIDESTEP_NAMESPACE": "recorded"}
    flags = shlex.split(run.flags)
    if run.engine == "sglang":
        return SglangServer(interpreter(), model, home, flags, environ)
    if "--enable-lora" in flags:
        flags += ["--lora-modules", *(f"{name}={make_adapter(home / name)}" for name in ADAPTERS)]
    return VllmServer(VLLM, model, home, [*TAP, *flags], environ)


@asynccontextmanager
async def recorder(home: Path, file: Path) -> AsyncIterator[ExporterProcess]:
    """Record what the server sends, in front of an exporter, until the block ends."""
    endpoint = f"ipc://{home}/ingest.ipc"
    stop = threading.Event()
    tee = Tee(f"ipc://{home}/tee.ipc", endpoint, file)
    thread = threading.Thread(target=tee.run, args=(stop,))
    thread.start()
    try:
        flags = ("--kv.sample-rate", "1")
        async with ExporterProcess(endpoint, home / "exporter.log", *flags) as exporter:
            await exporter.started()
            yield exporter
    finally:
        stop.set()
        thread.join()


async def settled(exporter: ExporterProcess) -> None:
    """Wait until the exporter has all that an idle engine has sent."""
    counts: list[float] = []
    while True:
        page = parse(await exporter.page())
        before, counts = counts, [value(page, name) for name in COUNTS]
        if idle(page) and counts == before:
            return
        await asyncio.sleep(SETTLE)


async def record(runs: Runs, home: Path) -> None:
    """Record runs, and store what each sent from its first request on."""
    whole = home / "whole.rec"
    times = {}
    origin = time.monotonic()
    async with recorder(home, whole) as exporter, server(runs, home) as started:
        await started.started()
        for name, load in runs.loads.items():
            begun = time.monotonic() - origin
            async with Client(started.base) as client:
                await load(client)
            await settled(exporter)
            times[name] = begun, time.monotonic() - origin
        # Nothing of its end is in a recording.
        started.kill()
    for name, (begun, ended) in times.items():
        cut = home / "cut.rec"
        store(whole, cut, begun, ended)
        compressed = gzip.compress(cut.read_bytes(), 9, mtime=0)
        recording(f"{name}.rec.gz").write_bytes(compressed)


def store(whole: Path, cut: Path, begun: float, ended: float) -> None:
    """Copy what was sent between two times, and what describes the processes before."""
    writer = Writer(cut)
    for entry in read(whole):
        if entry.at > ended:
            break
        if isinstance(entry, Items) and entry.at < begun:
            described = Samples, VllmSleep
            entry.items = [
                raw for raw in entry.items if isinstance(DIALECTS.decode(raw), described)
            ]
        entry.at = max(entry.at - begun, 0.0)
        if not isinstance(entry, Items) or entry.items:
            writer.write(entry)
    writer.close()


def main(names: Sequence[str]) -> None:
    """Record the servers with the named runs, or all."""
    for runs in RUNS:
        if names and not {*names} & runs.loads.keys():
            continue
        home = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
        try:
            asyncio.run(record(runs, home))
        finally:
            shutil.rmtree(home)


if __name__ == "__main__":
    main(sys.argv[1:])
