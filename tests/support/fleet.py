"""Exporters that recorded engines of all kinds feed, round after round, as sidecars would be fed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from exporters import DATA, LORA_RUN, MAIN_RUN, SPEC_RUN, page_of_engine, until
from publishers import Publisher
from ramped import overload, rise
from recorded import Published
from recorded import read as published
from sidestep.app import Exporter
from sidestep.config.settings import read
from sidestep_adapters.recording.replay import Replay
from tritons import PAGE, STATS, Triton, answer, recording, tritons

RUNS = {
    "vllm-0": MAIN_RUN,
    "vllm-1": SPEC_RUN,
    "vllm-2": LORA_RUN,
    "vllm-3": DATA / "core_aborts.rec.gz",
    "vllm-4": DATA / "core_lora.rec.gz",
    "sglang-0": DATA / "sglang.rec.gz",
    "sglang-1": DATA / "sglang_dp.rec.gz",
}
"""What each sidecar's engine did."""
STREAMS = {
    "kv-events": "sglang_kv_events",
    "load": "sglang_load_stat",
    "forward-pass": "sglang_forward_pass",
}
MODEL = "tiny"
OBJECTIVES = ("ttft=17ms", "inter_token=7.5ms", "e2e=350ms", "queue=3ms", "availability")
"""Of two exporters: none of these thresholds is a bound of the engines."""
SERVED = (
    recording("stats_all.http").partition(b"\r\n\r\n")[2],
    recording("stats_respstat.json"),
)
"""Statistics of Triton's models; the second one's answers come in parts."""
COUNTED = {"count", "ns", "inference_count", "execution_count"}


@dataclasses.dataclass
class Fleet:
    """What runs.

    Attributes:
        exporters: By name.
        triton: The server that one of them polls.
        publishers: By what another subscribes to.
        rounds: How often all has been played.
        said: Messages of each publisher.
    """

    exporters: dict[str, Exporter]
    triton: Triton
    publishers: dict[str, Publisher]
    rounds: int = 0
    said: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def urls(self) -> dict[str, str]:
        """Of the pages."""
        return {name: exporter.url for name, exporter in self.exporters.items()}

    async def play(self) -> None:
        """A round: every recording once."""
        self.rounds += 1
        for kind in self.publishers:
            for message in published(STREAMS[kind]):
                self.say(kind, message)
        # No recorded engine was asked for more than it could serve.
        await overload(self.exporters["vllm-0"])
        # One after the other would be slow, all at once would starve the exporters' loop.
        few = asyncio.Semaphore(3)

        async def play(name: str, exporter: Exporter) -> None:
            async with few:
                await asyncio.to_thread(replay, name, exporter.endpoints[0])

        fed = ((name, e) for name, e in self.exporters.items() if _kind(name) in RUNS)
        await asyncio.gather(*(play(name, exporter) for name, exporter in fed))

    async def live(self, seconds: float) -> None:
        """Play all recordings at the pace at which they were taken, over and over, for so long.

        No recorded engine was asked for more than it could serve: a simulated one is.
        """
        halted = threading.Event()

        def play(name: str, endpoint: str) -> None:
            run = Replay(RUNS[name], endpoint, realtime=True, namespace=name)
            run.run(once=False, stop=halted)

        fed = [(name, e.endpoints[0]) for name, e in self.exporters.items() if name in RUNS]
        # Threads of their own: exporters need those of the loop.
        with ThreadPoolExecutor(len(fed)) as threads:
            players = [threads.submit(play, *each) for each in fed]
            streams = [
                asyncio.create_task(self.publish(kind, seconds / 2)) for kind in self.publishers
            ]
            streams.append(asyncio.create_task(rise(self.exporters["vllm-3"], seconds)))
            try:
                await asyncio.sleep(seconds)
            finally:
                halted.set()
                for task in streams:
                    task.cancel()
            await asyncio.gather(*map(asyncio.wrap_future, players))

    async def publish(self, kind: str, seconds: float) -> None:
        """Say all messages of a stream in so many seconds, again and again."""
        messages = list(published(STREAMS[kind]))
        while True:
            for message in messages:
                self.say(kind, message)
                await asyncio.sleep(seconds / len(messages))

    def say(self, kind: str, message: Published) -> None:
        """A message, under the number that is next."""
        number = self.said[kind].to_bytes(8, "big")
        self.publishers[kind].send(message.topic, number, message.encoded)
        self.said[kind] += 1

    async def serve(self) -> None:
        """Let Triton count the load it was recorded under once more every quarter of a second."""
        for times in itertools.count(1):
            self.triton.say(STATS, answer(statistics(times)))
            await asyncio.sleep(0.25)


PATIENCE = 60.0
"""Seconds until an exporter answers: nine share a loop here, and the machine with other tests."""


def replay(name: str, endpoint: str) -> None:
    """Play what the engine of this name did; adapters are there as long as they run, so these last."""
    run = RUNS[_kind(name)]
    Replay(run, endpoint, realtime=run is LORA_RUN, namespace=name, connect_timeout=PATIENCE).run()


def _kind(name: str) -> str:
    return name.removesuffix("-native")


def statistics(times: int) -> bytes:
    """Triton's answer after so many such loads, the last just now."""

    def scaled(found: dict[str, Any]) -> dict[str, Any]:
        return {key: n * times if key in COUNTED else n for key, n in found.items()}

    models = [
        model for text in SERVED for model in json.loads(text, object_hook=scaled)["model_stats"]
    ]
    for model in models:
        model["last_inference"] = int(time.time() * 1000)
    return json.dumps({"model_stats": models}).encode()


def settings(directory: Path, name: str, **flags: Any) -> dict[str, Any]:
    """Of one exporter."""
    return {
        "web_listen_address": ("127.0.0.1:0",),
        "ingest_endpoint": (f"ipc://{directory}/{name}.ipc",),
        "log_stats_interval": "0",
        "limits_memory_soft": "0",
        "limits_memory_hard": "0",
        "kv_sample_rate": "1",
        **flags,
    }


@contextlib.asynccontextmanager
async def fleet(directory: Path, *, native: tuple[str, ...] = ()) -> AsyncIterator[Fleet]:
    """All that run; those named ``native`` once more, with native histograms alone."""
    flags: dict[str, dict[str, Any]] = {name: {} for name in RUNS}
    flags["vllm-0"] = {"state_dir": f"{directory}/state", "slo": OBJECTIVES}
    flags["sglang-0"] = {"slo": OBJECTIVES}
    flags["vllm-2"] = {"metrics_legacy": True}
    flags |= {f"{name}-native": {"histograms": "native"} for name in native}
    async with contextlib.AsyncExitStack() as stack:
        triton = await stack.enter_async_context(tritons())
        for text in SERVED:
            for model in json.loads(text)["model_stats"]:
                name = model["name"]
                triton.load(name, model["version"])
                triton.configs[name] = {"name": name, "instance_group": [{"count": 2}]}
        triton.configs["cached"]["response_cache"] = {"enable": True}
        triton.say(STATS, answer(statistics(0)))
        triton.say(PAGE, answer(page_of_engine("page_triton").encode(), kind="text/plain"))
        flags["triton-0"] = {"triton": (f"{triton.url},interval=1,metrics={triton.url}{PAGE}",)}
        publishers = {
            kind: stack.enter_context(Publisher(f"ipc://{directory}/{kind}")) for kind in STREAMS
        }
        flags["streams-0"] = {
            "subscribe": tuple(
                f"{kind}={publisher.endpoint},model={MODEL}"
                for kind, publisher in publishers.items()
            )
        }
        running: dict[str, Exporter] = {}
        for name, given in flags.items():
            config = read(settings(directory, name, **given), {})
            running[name] = await stack.enter_async_context(Exporter(config).running())
        made = Fleet(running, triton, publishers)
        for publisher in publishers.values():
            # It says so once: asked together, one that is late would hide who was there before.
            await until(lambda publisher=publisher: publisher.subscribed)  # type: ignore[misc]
        serving = asyncio.create_task(made.serve())
        try:
            yield made
        finally:
            serving.cancel()
