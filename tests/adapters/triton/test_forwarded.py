"""An exporter beside a server forwards its counts: each arrives upstream once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from exporters import Start, until
from sidestep.app import Exporter
from sidestep.metrics.computed_gauges import scalar
from sidestep_adapters.triton.proto import MESSAGES
from triton_grpc_server import FakeTriton, serving

ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("SIDESTEP_")}
Process = asyncio.subprocess.Process


class Counting(FakeTriton):
    """A Triton with three models that have served some requests each."""

    def __init__(self) -> None:
        super().__init__()
        self.served = {f"m{n}": 0 for n in range(3)}
        self.answer("ServerMetadata", extensions=["statistics"])
        self.answer("ModelConfig", config={"instance_group": [{"count": 1}]})
        self.serve(0)

    def serve(self, requests: int) -> None:
        """Serve more requests of each model."""
        self.served = {model: count + requests for model, count in self.served.items()}
        self.answer("ModelStatistics", model_stats=[
            MESSAGES["ModelStatistics"](
                name=model,
                version="1",
                last_inference=1,
                inference_count=count,
                execution_count=count,
                inference_stats={"success": {"count": count, "ns": 1000 * count}},
            ).SerializeToString()
            for model, count in self.served.items()
        ])  # fmt: skip


@contextlib.asynccontextmanager
async def downstream(host: str, upstream: Exporter, home: Path) -> AsyncIterator[Process]:
    """Run an exporter without a page that polls ``host``; kill it in the end."""
    arguments = {
        "triton": f"grpc://{host},interval=0.05",
        "forward": upstream.endpoints[0],
        "forward.interval": 0.1,
        "forward.source": "pod-1",
        "forward.label": "pod=pod-1",
        "state.dir": home / "state",
        "ingest.endpoint": f"ipc://{home}/downstream/ingest.ipc",
        "web.listen-address": "",
    }
    flags = [f"--{name}={value}" for name, value in arguments.items()]
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sidestep", "serve", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=ENVIRON,
    )  # fmt: skip
    try:
        yield made
    finally:
        if made.returncode is None:
            made.kill()
        await made.communicate()


def counts(upstream: Exporter) -> dict[str, int]:
    """Return the requests of each model."""
    return {
        engine.labels["model"]: int(scalar(engine, "nv_inference_request_success"))
        for engine in upstream.registry.engines.values()
        if "model" in engine.labels
    }


async def test_counts_and_state_arrive_upstream(start: Start, tmp_path: Path) -> None:
    """They have the labels added on the way; a stopped server is down, and returns with more."""
    triton = Counting()
    async with start() as upstream, contextlib.AsyncExitStack() as stack:
        async with serving(triton) as host:
            made = await stack.enter_async_context(downstream(host, upstream, tmp_path))
            triton.serve(5)
            await until(lambda: counts(upstream) == triton.served, 30)
        engines = upstream.registry.engines.values()
        (server,) = [engine for engine in engines if "model" not in engine.labels]
        assert all(engine.labels["pod"] == "pod-1" for engine in engines)

        def state(name: str) -> bool:
            return server.open_families["sidestep_triton_state"].children[name,] == 1

        await until(lambda: state("down"), 30)
        triton.serve(4)
        async with serving(triton, port=triton.port):
            await until(lambda: counts(upstream) == triton.served and state("up"), 30)
            made.send_signal(signal.SIGTERM)
            output, _ = await asyncio.wait_for(made.communicate(), 30)
            assert made.returncode == 0, output


async def test_a_killed_exporter_beside_the_server_resumes(start: Start, tmp_path: Path) -> None:
    """Requests served meanwhile are counted once, after it polls again."""
    triton = Counting()
    async with serving(triton) as host, start() as upstream:
        for _ in range(3):
            async with downstream(host, upstream, tmp_path) as made:
                triton.serve(5)
                await until(lambda: counts(upstream) == triton.served, 30)
                made.kill()
                await made.wait()
                triton.serve(3)
        async with downstream(host, upstream, tmp_path):
            await until(lambda: counts(upstream) == triton.served, 30)

        assert triton.served["m0"] == 24
