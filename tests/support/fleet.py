"""Exporters of all dialects that recorded engines feed, round after round."""

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

from msgspec import Raw

from exporters import MAIN_RUN, SPEC_RUN, page_of_engine, recorded_run, until
from handed_over import HandOvers
from lookup_senders import serve_model
from polled_engines import polled_engines
from publishers import Publisher
from ramped import overload, rise
from recorded import Published
from recorded import read as published
from sidestep.app.exporter import Exporter
from sidestep.app.run import running
from sidestep.config.settings import read
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import VllmStep
from sidestep.protocol.iteration_stats import FinishedRequestStats, IterationStats
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import CORE, Batch, EngineInfo, Heartbeat, Hello
from sidestep.protocol.progress import Progress
from sidestep_adapters.recording.replay import Replay
from socket_peers import connect
from tritons import PAGE, STATS, Triton, answer, recording, tritons

RUNS = {
    "vllm-0": MAIN_RUN,
    "vllm-1": SPEC_RUN,
    "vllm-2": recorded_run("lora"),
    "vllm-3": recorded_run("core_aborts"),
    "vllm-4": recorded_run("vllm-lora"),
    "sglang-0": recorded_run("sglang"),
    "sglang-1": recorded_run("sglang_dp"),
}
"""Recording that each exporter gets."""
HUNG = {
    "vllm-1": EngineInfo("hung/hung/0", "vllm", {"engine": "0", "model_name": "hung"}, role=CORE),
    "sglang-1": EngineInfo(
        "hung/hung/sglang/scheduler/tp_rank=0", "sglang", {"model_name": "hung"}, role=CORE
    ),
}
"""Engine that each of these exporters gets besides: its step does not end."""
STREAMS = {
    "kv-events": "sglang_kv_events",
    "load": "sglang_load_stat",
    "forward-pass": "sglang_forward_pass",
}
MODEL = "tiny"
OBJECTIVES = ("ttft=17ms", "inter_token=7.5ms", "e2e=350ms", "queue=3ms", "availability")
"""Objectives of two exporters; no threshold is a bucket bound of the engines."""
PRICES = "*,input=0.5,cached=0.05,output=1.5"
SERVED = (
    recording("stats_all.http").partition(b"\r\n\r\n")[2],
    recording("stats_respstat.json"),
)
"""Statistics of Triton's models; those of the second recording stream their responses."""
COUNTED = {"count", "ns", "inference_count", "execution_count"}


@dataclasses.dataclass
class Fleet:
    """Running exporters and their sources.

    Attributes:
        exporters: Exporters by name.
        triton: The server that one exporter polls.
        publishers: Publishers of streams to which one exporter subscribes.
        hand_overs: Engines that hand requests over, of one exporter.
        rounds: How often everything has been played.
        said: Messages sent by each publisher.
    """

    exporters: dict[str, Exporter]
    triton: Triton
    publishers: dict[str, Publisher]
    hand_overs: HandOvers
    rounds: int = 0
    said: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def urls(self) -> dict[str, str]:
        """Metrics URL of each exporter."""
        return {name: exporter.url for name, exporter in self.exporters.items()}

    async def play(self) -> None:
        """Play every recording once."""
        self.rounds += 1
        # No recorded engine handed requests over to another.
        self.hand_overs.play()
        for kind in self.publishers:
            for message in published(STREAMS[kind]):
                self.send(kind, message)
        # One at a time is slow, all at once starve the exporters' event loop.
        few = asyncio.Semaphore(3)

        async def play(name: str, exporter: Exporter) -> None:
            async with few:
                await asyncio.to_thread(replay, name, exporter.endpoints[0])

        fed = ((name, e) for name, e in self.exporters.items() if _kind(name) in RUNS)
        await asyncio.gather(
            # No recording has lookups in the prefix cache.
            asyncio.to_thread(serve_model, self.exporters["vllm-1"].endpoints[0], "lookups"),
            # No recording has an overloaded engine.
            overload(self.exporters["vllm-0"]),
            *(play(name, exporter) for name, exporter in fed),
        )

    @contextlib.asynccontextmanager
    async def adapters_running(self) -> AsyncIterator[None]:
        """Play the recording with LoRA adapters over and over, at its own pace.

        Adapters have series only while they run, and ``play`` is too fast for a scrape to see them.
        """
        halted = threading.Event()
        endpoint = self.exporters["vllm-2"].endpoints[0]
        run = Replay(RUNS["vllm-2"], endpoint, realtime=True, namespace="adapters")
        playing = asyncio.create_task(asyncio.to_thread(run.run, once=False, stop=halted))
        try:
            yield
        finally:
            halted.set()
            await playing

    async def live(self, seconds: float) -> None:
        """Play all recordings over and over for ``seconds``, at the pace at which they were taken.

        A simulated engine is overloaded, and others hand requests over, as no recording has such ones.
        """
        halted = threading.Event()

        def play(name: str, endpoint: str) -> None:
            run = Replay(RUNS[name], endpoint, realtime=True, namespace=name)
            run.run(once=False, stop=halted)

        fed = [(name, e.endpoints[0]) for name, e in self.exporters.items() if name in RUNS]
        # The exporters need the threads of the event loop.
        with ThreadPoolExecutor(len(fed)) as threads:
            players = [threads.submit(play, *each) for each in fed]
            streams = [
                asyncio.create_task(self.publish(kind, seconds / 2)) for kind in self.publishers
            ]
            streams.append(asyncio.create_task(rise(self.exporters["vllm-3"], seconds)))
            streams.append(asyncio.create_task(self.hand_over()))
            try:
                await asyncio.sleep(seconds)
            finally:
                halted.set()
                for task in streams:
                    task.cancel()
            await asyncio.gather(*map(asyncio.wrap_future, players))

    async def hand_over(self) -> None:
        """Hand requests over, until cancelled."""
        while True:
            self.hand_overs.play()
            await asyncio.sleep(10.0)

    async def publish(self, kind: str, seconds: float) -> None:
        """Publish all messages of a stream in every ``seconds``, until cancelled."""
        messages = list(published(STREAMS[kind]))
        while True:
            for message in messages:
                self.send(kind, message)
                await asyncio.sleep(seconds / len(messages))

    def send(self, kind: str, message: Published) -> None:
        """Publish a message under the next sequence number."""
        number = self.said[kind].to_bytes(8, "big")
        self.publishers[kind].send(message.topic, number, message.encoded)
        self.said[kind] += 1

    async def serve(self) -> None:
        """Add the recorded load to Triton's counts every quarter of a second."""
        for times in itertools.count(1):
            self.triton.respond(STATS, answer(statistics(times)))
            await asyncio.sleep(0.25)


async def hang(exporter: Exporter, info: EngineInfo) -> None:
    """Send heartbeats of an engine with a step that does not end, until cancelled.

    A request of an engine of vLLM ends each second all the same: without any, the mean latency over
    all engines would not be a number.
    """
    progress = Progress(0, steps=9, unfinished=3, step_age=200.0)
    async with connect(exporter) as peer:
        await peer.send(Hello(VERSION, info.id, 1, 1, 1, [info]))
        for seq in itertools.count(1):
            if info.dialect == "vllm":
                ended = IterationStats(
                    time_to_first_tokens_iter=[0.1],
                    finished_requests=[FinishedRequestStats(e2e_latency=0.2)],
                )
                item = VllmStep(0, float(seq), time.time(), None, ended)
                await peer.send(Batch(1, seq, [Raw(encode_item(item))]))
            await peer.send(Heartbeat(1, 0, 0, progress=[progress]))
            await asyncio.sleep(1)


PATIENCE = 60.0
"""Seconds until an exporter answers: all share one event loop."""


def replay(name: str, endpoint: str) -> None:
    """Play the recording of an engine as fast as its exporter accepts it."""
    run = RUNS[_kind(name)]
    Replay(run, endpoint, realtime=False, namespace=name, connect_timeout=PATIENCE).run()


def _kind(name: str) -> str:
    return name.removesuffix("-native")


def statistics(times: int) -> bytes:
    """Return Triton's statistics after ``times`` recorded loads, the last of them now."""

    def scaled(found: dict[str, Any]) -> dict[str, Any]:
        return {key: n * times if key in COUNTED else n for key, n in found.items()}

    models = [
        model for text in SERVED for model in json.loads(text, object_hook=scaled)["model_stats"]
    ]
    for model in models:
        model["last_inference"] = int(time.time() * 1000)
    return json.dumps({"model_stats": models}).encode()


def settings(directory: Path, name: str, **flags: Any) -> dict[str, Any]:
    """Return the settings of one exporter."""
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
    """Run all exporters; those named ``native`` also a second time, with native histograms alone."""
    flags: dict[str, dict[str, Any]] = {name: {} for name in RUNS}
    flags["vllm-0"] = {"state_dir": f"{directory}/state", "slo": OBJECTIVES}
    flags["sglang-0"] = {"slo": OBJECTIVES}
    flags["vllm-2"] = {"metrics_legacy": True}
    flags["vllm-4"] = {"tenants_by": "adapter", "prices_model": (PRICES,), "prices_gpu_hour": "2.5"}
    flags |= {f"{name}-native": {"histograms": "native"} for name in native}
    async with contextlib.AsyncExitStack() as stack:
        triton = await stack.enter_async_context(tritons())
        for text in SERVED:
            for model in json.loads(text)["model_stats"]:
                name = model["name"]
                triton.load(name, model["version"])
                triton.configs[name] = {"name": name, "instance_group": [{"count": 2}]}
        triton.configs["cached"]["response_cache"] = {"enable": True}
        triton.respond(STATS, answer(statistics(0)))
        triton.respond(PAGE, answer(page_of_engine("page_triton").encode(), kind="text/plain"))
        polled = await stack.enter_async_context(polled_engines())
        flags |= polled.flags
        flags["llamacpp-0"]["slo"] = OBJECTIVES
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
        exporters: dict[str, Exporter] = {}
        for name, given in flags.items():
            config = read(settings(directory, name, **given), {})
            exporters[name] = await stack.enter_async_context(running(Exporter(config)))
        hand_overs = HandOvers(exporters["vllm-2"].endpoints[0])
        stack.callback(hand_overs.close)
        made = Fleet(exporters, triton, publishers, hand_overs)
        for publisher in publishers.values():
            # ``subscribed`` is True once, so each publisher is awaited on its own.
            await until(lambda publisher=publisher: publisher.subscribed)  # type: ignore[misc]
        tasks = [asyncio.create_task(made.serve()), asyncio.create_task(polled.serve())]
        tasks += [asyncio.create_task(hang(exporters[name], HUNG[name])) for name in HUNG]
        try:
            yield made
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
