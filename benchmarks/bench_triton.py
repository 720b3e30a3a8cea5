"""What polling a Triton server costs the exporter: CPU time a poll, and of a core once a second.

The server is another process that answers as a recorded Triton with 501 models did: ``idle`` says
the same each time, with ``busy`` every model has counted more since the poll before. One poll
asks over HTTP or gRPC, reads all models and adds what is new to their series.

``poll`` is the CPU time of this process from asking until all is added, the median of many.
``share`` is what an exporter process takes of a core at one poll a second, of which what it takes
without a server is not left out. The peer is a parser that reads the same answer with ``json`` and sets
``prometheus_client`` gauges to what it says: no resets, no restarts, no histogram.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import gzip
import itertools
import json
import multiprocessing
import statistics
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Gauge

from benchmarks.process import SERVE, ExporterProcess
from benchmarks.table import percentile, show
from sidestep.catalog.layout_builder import compile_layout
from sidestep.config.triton_servers import parse
from sidestep.engines.dialects import DIALECTS
from sidestep.ingest.intake import Intake
from sidestep.ingest.local_stream import ServerFeed
from sidestep.metrics.registry import Registry
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep_adapters.triton.proto import MESSAGES
from sidestep_adapters.triton.sources import poller

RECORDED = Path(__file__).parents[1] / "tests/data/triton/stats_501_models.json.gz"
STATS = "/v2/models/stats"
KINDS = ("idle", "busy")
SCHEMES = ("http", "grpc")
Context = grpc.aio.ServicerContext[bytes, bytes]
Models = Iterable[list[dict[str, Any]]]
VARIANTS = 40
"""Different answers of a busy server; after the last one it has been started anew."""


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--polls", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the exporter process")
    args = parser.parse_args()
    rows: list[list[str]] = []
    for kind, scheme in itertools.product(KINDS, SCHEMES):
        with server(kind, scheme) as url:
            spent = asyncio.run(polls(url, args.polls))
            share, lag = process(url, args.seconds)
            is_http = scheme == "http"
            theirs = [peer(url) for _ in range(max(args.polls // 5, 5))] if is_http else []
            rows.append(
                [
                    f"{kind}, {scheme}",
                    f"{statistics.median(spent) * 1e3:.1f}",
                    f"{percentile(spent, 0.95) * 1e3:.1f}",
                    f"{share * 100:.2f}",
                    f"{lag * 1e3:.1f}",
                    f"{statistics.median(theirs) * 1e3:.1f}" if theirs else "",
                ]
            )
    show(
        "Polls of a Triton server with 501 models; wanted: 15 ms a poll, 3 % of a core",
        ["models", "poll ms", "p95 ms", "share %", "longest wait of the loop ms", "peer ms"],
        rows,
    )


async def polls(url: str, count: int) -> list[float]:
    """CPU seconds of each poll, the first one, which makes the series, left out."""
    registry = Registry({name: compile_layout(dialect) for name, dialect in DIALECTS.items()}, {})
    intake = Intake(registry, SelfMetrics(), boot=1, clock=time.monotonic, wall=time.time)
    feed = ServerFeed(intake, "triton")
    triton = poller(parse(url), feed, intake.reject, has_failures=True)
    triton._connection.open()
    found: list[float] = []
    for _ in range(count + 1):
        begun = time.process_time()
        await triton._poll()
        more = True
        while more:
            more = triton.receive(time.monotonic())
            while intake.busy:
                intake.work()
        found.append(time.process_time() - begun)
    await triton._connection.close()
    if len(registry.engines) != 502:
        raise SystemExit(f"{len(registry.engines)} engines, not 502")
    return found[1:]


def process(url: str, seconds: float) -> tuple[float, float]:
    """Share of a core of an exporter that polls once a second, and its loop's longest wait."""
    with ExporterProcess((*SERVE, "--triton", url)) as exporter:
        while exporter.totals.get("sidestep_triton_model_versions") != 501:
            time.sleep(0.2)
        time.sleep(2.0)
        before = exporter.cpu_seconds
        time.sleep(seconds)
        share = (exporter.cpu_seconds - before) / seconds
        return share, exporter.totals["sidestep_loop_lag_seconds"]


def peer(url: str) -> float:
    """CPU seconds of one poll, as one writes it in an afternoon."""
    begun = time.process_time()
    with urllib.request.urlopen(url + STATS, timeout=10.0) as response:
        models = json.loads(response.read())["model_stats"]
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    for model in models:
        told = model["inference_stats"]
        flat = {f"{name}_{field}": told[name][field] for name in told for field in ("count", "ns")}
        for name, value in flat.items():
            if name not in gauges:
                gauges[name] = Gauge(name, name, ["model", "version"], registry=registry)
            gauges[name].labels(model["name"], model["version"]).set(value)
    return time.process_time() - begun


@contextlib.contextmanager
def server(kind: str, scheme: str) -> Iterator[str]:
    """The URL of one that is ``kind``, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    running = context.Process(target=serve, args=(kind, scheme, theirs), daemon=True)
    running.start()
    try:
        yield f"{scheme}://127.0.0.1:{ours.recv()}"
    finally:
        running.terminate()
        running.join()


def serve(kind: str, scheme: str, pipe: Connection) -> None:
    """Answer until the process is ended."""
    answers = list(_answers(VARIANTS if kind == "busy" else 1))
    asyncio.run((_serve if scheme == "http" else _serve_grpc)(answers, pipe.send))


async def _serve(answers: Models, started: Callable[[int], None]) -> None:
    bodies = [json.dumps({"model_stats": each}, separators=(",", ":")).encode() for each in answers]
    number = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal number
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].decode()
        if path == STATS:
            body = bodies[number % len(bodies)]
            number += 1
        else:
            body = json.dumps({"extensions": ["statistics"], "instance_group": [{}]}).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    started(listening.sockets[0].getsockname()[1])
    await listening.serve_forever()


async def _serve_grpc(answers: Models, started: Callable[[int], None]) -> None:
    bodies: Iterator[bytes] = itertools.cycle([
        MESSAGES["ModelStatisticsResponse"](
            model_stats=[MESSAGES["ModelStatistics"](**model).SerializeToString() for model in each]
        ).SerializeToString()
        for each in answers
    ])  # fmt: skip
    others = {
        "ServerMetadata": MESSAGES["ServerMetadataResponse"](extensions=["statistics"]),
        "ModelConfig": MESSAGES["ModelConfigResponse"](config={"instance_group": [{"count": 1}]}),
    }

    async def statistics(_: bytes, __: Context) -> bytes:
        return next(bodies)

    def saying(message: Any) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def answer(_: bytes, __: Context) -> bytes:
            return bytes(message.SerializeToString())

        return answer

    methods = {
        "ModelStatistics": statistics,
        **{name: saying(each) for name, each in others.items()},
    }
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        name: grpc.unary_unary_rpc_method_handler(each) for name, each in methods.items()
    }
    running = grpc.aio.server()
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)
    running.add_generic_rpc_handlers((service,))
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    started(port)
    await running.wait_for_termination()


def _answers(count: int) -> Models:
    """Of which each has counted more in every model than the one before."""
    models = json.loads(gzip.decompress(RECORDED.read_bytes()))["model_stats"]
    for _ in range(count):
        yield copy.deepcopy(models)
        for model in models:
            model["last_inference"] += 1000
            model["inference_count"] += 3
            model["execution_count"] += 2
            for timed in _timed(model):
                timed["count"] += 2
                timed["ns"] += 12_345_678


def _timed(model: dict[str, Any]) -> Iterator[dict[str, int]]:
    told = model["inference_stats"]
    yield from (told[name] for name in ("success", "queue"))
    for part in ("compute_input", "compute_infer", "compute_output"):
        yield told[part]
        yield from (batch[part] for batch in model["batch_stats"])


if __name__ == "__main__":
    main()
