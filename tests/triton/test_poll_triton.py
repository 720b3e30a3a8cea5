"""The poller as a process of its own: what it says arrives once, whichever process dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from conftest import Start, until
from sidestep.app import Exporter
from sidestep.metrics.computed_gauges import scalar
from sidestep_adapters.triton.proto import MESSAGES
from triton_grpc_server import FakeTriton, serving

ENVIRON = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SIDESTEP_")},
    "SIDESTEP_NAMESPACE": "n",
}
Process = asyncio.subprocess.Process


class Counting(FakeTriton):
    """A Triton with models that have served so many requests each."""

    def __init__(self, models: int = 3) -> None:
        super().__init__()
        self.served = {f"m{n}": 0 for n in range(models)}
        self.answer("ServerMetadata", extensions=["statistics"])
        self.answer("ModelConfig", config={"instance_group": [{"count": 1}]})
        self.serve(0)

    def serve(self, requests: int) -> None:
        """So many more of each model."""
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
async def process(*arguments: object) -> AsyncIterator[Process]:
    """A command of ours, killed in the end."""
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sidestep", *map(str, arguments),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=ENVIRON,
    )  # fmt: skip
    try:
        yield made
    finally:
        if made.returncode is None:
            made.kill()
        await made.communicate()


def polling(where: str, endpoint: str) -> contextlib.AbstractAsyncContextManager[Process]:
    """The command, with short intervals."""
    return process("poll-triton", f"grpc://{where},interval=0.05", "--connect", endpoint)


async def ended(made: Process, number: int) -> tuple[int | None, str]:
    """Exit code and output of a process that got a signal."""
    made.send_signal(number)
    output, _ = await asyncio.wait_for(made.communicate(), 20)
    return made.returncode, output.decode()


def counts(exporter: Exporter) -> dict[str, int]:
    """Requests of each model on the page."""
    return {
        engine.labels["model"]: int(scalar(engine, "nv_inference_request_success"))
        for engine in exporter.registry.engines.values()
        if "model" in engine.labels
    }


async def test_it_pushes_what_it_polls(start: Start) -> None:
    """And says goodbye when it is told to end: nothing is fed any more."""
    triton = Counting()
    async with serving(triton) as where, start() as exporter:
        async with polling(where, exporter.endpoints[0]) as poller:
            triton.serve(5)
            await until(lambda: counts(exporter) == triton.served, 30)
            engines = list(exporter.registry.engines.values())
            assert {engine.id for engine in engines} == {
                f"triton/n/grpc://{where}",
                *(f"triton/n/grpc://{where}/{model}/1" for model in triton.served),
            }
            triton.serve(2)
            await until(lambda: counts(exporter) == triton.served)
            code, output = await ended(poller, signal.SIGTERM)

        assert code == 0, output
        assert "Traceback" not in output
        assert not any(engine.streams for engine in exporter.registry.engines.values())
        assert exporter.metrics.value("sidestep_messages_total", "bye") == 1
        assert counts(exporter) == {"m0": 7, "m1": 7, "m2": 7}


async def test_a_killed_poller_goes_on(start: Start) -> None:
    """What was served while none polled is counted once the next one does."""
    triton = Counting()
    async with serving(triton) as where, start() as exporter:
        for _ in range(3):
            async with polling(where, exporter.endpoints[0]) as poller:
                triton.serve(5)
                await until(lambda: counts(exporter) == triton.served, 30)
                poller.kill()
                triton.serve(3)
        async with polling(where, exporter.endpoints[0]):
            await until(lambda: counts(exporter) == triton.served, 30)

        assert triton.served["m0"] == 24


async def test_a_server_that_goes_is_not_fed(start: Start) -> None:
    """Its own state is told on, and it comes back with all it had and more."""
    triton = Counting()
    async with start() as exporter:
        async with serving(triton) as where:
            poller = polling(where, exporter.endpoints[0])
            made = await poller.__aenter__()
            triton.serve(5)
            await until(lambda: counts(exporter) == triton.served, 30)
        models = [e for e in exporter.registry.engines.values() if "model" in e.labels]
        await until(lambda: not any(engine.streams for engine in models))
        server = exporter.registry.engines[f"triton/n/grpc://{where}"]
        assert server.streams
        state = server.open["sidestep_triton_state"].children
        await until(lambda: state["down",] == 1)
        triton.serve(4)
        async with serving(triton, port=triton.port):
            await until(lambda: counts(exporter) == triton.served)
            await until(lambda: state["up",] == 1 and all(engine.streams for engine in models))
            assert (await ended(made, signal.SIGINT))[0] == 0
        await poller.__aexit__(None, None, None)


@contextlib.asynccontextmanager
async def exporting(tmp_path: Path) -> AsyncIterator[tuple[Process, str]]:
    """An exporter process that keeps its state, and its page's URL."""
    arguments = {
        "web.listen-address": "127.0.0.1:0",
        "ingest.endpoint": f"ipc://{tmp_path}/ingest.ipc",
        "state.dir": tmp_path / "state",
        "log.stats-interval": 0,
    }
    flags = [part for name, value in arguments.items() for part in (f"--{name}", value)]
    async with process("serve", *flags) as made:
        assert made.stdout is not None
        line = (await asyncio.wait_for(made.stdout.readline(), 30)).decode()
        found = re.search(r"http://\S+/metrics", line)
        assert found, line
        yield made, found[0]


async def shown(url: str, wanted: int, models: int, timeout: float = 30) -> None:
    """Wait until the page has so many requests of each model."""
    lines: list[str] = []

    async def look() -> None:
        async with aiohttp.ClientSession() as session:
            while len(lines) != models or any(float(line.split()[-1]) != wanted for line in lines):
                await asyncio.sleep(0.05)
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(url) as response:
                        page = await response.text()
                    lines[:] = [
                        line
                        for line in page.splitlines()
                        if line.startswith("nv_inference_request_success{")
                    ]
                values = [float(line.split()[-1]) for line in lines]
                assert max(values, default=0) <= wanted, lines

    try:
        await asyncio.wait_for(look(), timeout)
    except asyncio.TimeoutError:
        raise AssertionError(f"not {wanted}: {lines}") from None


@pytest.mark.timeout(200)
async def test_a_killed_exporter_goes_on(tmp_path: Path) -> None:
    """Nothing is lost and nothing comes twice, also where the poller dies meanwhile."""
    triton = Counting()
    endpoint = f"ipc://{tmp_path}/ingest.ipc"
    async with serving(triton) as where:
        async with polling(where, endpoint) as poller:
            for count in (5, 6):
                async with exporting(tmp_path) as (exporter, url):
                    triton.serve(count)
                    await shown(url, triton.served["m0"], 3)
                    exporter.kill()
                    triton.serve(1)
            poller.kill()
        triton.serve(7)
        async with polling(where, endpoint), exporting(tmp_path) as (_, url):
            await shown(url, 20, 3)


async def test_two_of_one_name_are_a_mistake(start: Start) -> None:
    """The second ends, and says why."""
    triton = Counting(1)
    async with (
        serving(triton) as where,
        start() as exporter,
        polling(where, exporter.endpoints[0]) as first,
    ):
        triton.serve(5)
        await until(lambda: counts(exporter) == triton.served, 30)
        async with polling(where, exporter.endpoints[0]):
            output, _ = await asyncio.wait_for(first.communicate(), 30)

    assert first.returncode == 1
    assert "another SIDESTEP_NAMESPACE" in output.decode()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "Missing argument"),
        (["ftp://h"], "must be URL"),
        (["grpc://h/v2"], "a URL of gRPC has no path"),
        (["http://h", "http://h"], "given twice"),
        (["http://h", "--connect", "udp://x"], "must begin with ipc:// or tcp://"),
        (["http://h,metrics=http://h:8002"], "metrics= is the exporter's"),
        (["grpcs://h,ca=/nowhere.pem"], "/nowhere.pem"),
        (["grpc://h,header.x-bin=1"], "cannot be sent over gRPC"),
        (["http://h", "--namespace", "a\nb"], "a namespace must be printable"),
    ],
)
async def test_a_mistake_is_one_line(arguments: list[str], what: str) -> None:
    """And exit code 2."""
    async with process("poll-triton", *arguments) as made:
        output, _ = await asyncio.wait_for(made.communicate(), 30)

    assert made.returncode == 2
    (line,) = output.decode().splitlines()
    assert line.startswith("sidestep: ")
    assert what in line
