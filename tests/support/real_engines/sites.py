"""Sites of tests with a real vLLM or SGLang, and load that goes on while a test interferes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from exporters import until
from real_engines.comparison import Page, settled_alone, value
from real_engines.load import Answer, Ask, Client
from real_engines.processes import (
    ExporterProcess,
    Process,
    Server,
    VllmServer,
    engine_environ,
)
from real_engines.sglang_server import SglangServer

TOKENS = 40
"""Tokens of each completion that ``completions`` and ``SteadyLoad`` ask for."""
STALL = 10.0
"""Seconds between two tokens that a busy machine does not explain; an engine makes one in 5 to 10 ms."""
PUBLISHER = "sidestep_adapters/publisher/publisher.py"
"""File name in the stack of a publisher thread."""
DUMP_THREADS = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR2)
"""
"""Start-up code with which a process prints the stacks of its threads on SIGUSR2."""
TAP = ["--scheduler-cls", "sidestep_adapters.vllm.scheduler.SidestepScheduler"]
"""Flags with which vLLM's core has a scheduler tap."""
BLOCK_LIFETIMES = "vllm:kv_block_lifetime_seconds"
BLOCKS = (
    BLOCK_LIFETIMES,
    "vllm:kv_block_idle_before_evict_seconds",
    "vllm:kv_block_reuse_gap_seconds",
)
"""Families that vLLM's page lacks without --kv-cache-metrics; a tap samples blocks by itself."""
IDLE_ADAPTERS = {"max_lora": "1", "running_lora_adapters": "", "waiting_lora_adapters": ""}
"""Labels of the combination of LoRA adapters while none is active, with --max-loras 1."""


@dataclasses.dataclass(frozen=True)
class Site:
    """The interpreter and the model of an engine, and one test's folder and ingest endpoint."""

    name: ClassVar[str]
    kind: ClassVar[Callable[..., Server]]
    generated: ClassVar[str]
    finished: ClassVar[str]
    mode: ClassVar[str]
    python: Path
    model: Path
    home: Path
    endpoint: str

    def server(
        self,
        flags: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        *,
        sends: bool = True,
        **more: Any,
    ) -> Server:
        """Start a server of ``kind``, which has the exporter's endpoint if it ``sends``."""
        own = {"SIDESTEP_ENDPOINT": self.endpoint} if sends else {}
        settings = {**own, **(environ or {})}
        return self.kind(self.python, self.model, self.home, flags, settings, **more)

    def exporter(self, *flags: str) -> ExporterProcess:
        """Start an exporter."""
        return ExporterProcess(self.endpoint, self.home / "exporter.log", *flags)

    @contextlib.asynccontextmanager
    async def with_exporter(self, server: Server, *flags: str) -> AsyncIterator[ExporterProcess]:
        """Start an exporter beside ``server`` and wait for both; in the end both must stop."""
        async with self.exporter(*flags) as exporter, server:
            await exporter.started()
            await server.started()
            yield exporter


class VllmSite(Site):
    """A site with vLLM's server."""

    name = "vllm"
    kind = VllmServer
    generated = "vllm:generation_tokens"
    finished = "vllm:request_success"
    mode = "SIDESTEP_VLLM_MODE"

    async def run_program(
        self, script: Path, *arguments: Path, environ: Mapping[str, str]
    ) -> tuple[int | None, str]:
        """Run a program that embeds vLLM, and return its exit code and its output."""
        command = [str(self.python), str(script), str(self.model), *map(str, arguments)]
        own = {**engine_environ(self.home), "SIDESTEP_ENDPOINT": self.endpoint}
        async with Process(command, {**own, **environ}, self.home / "program.log") as program:
            await until(lambda: program.code is not None, 300, "end of the program")
            return program.code, program.output


class SglangSite(Site):
    """A site with SGLang's server."""

    name = "sglang"
    kind = SglangServer
    generated = "sglang:generation_tokens"
    finished = "sglang:num_requests"
    mode = "SIDESTEP_SGLANG_MODE"


class SteadyLoad:
    """Four clients that each ask for one completion after the other.

    Args:
        client: Client of the server.
        streams: One of this many clients asks for streams.

    Attributes:
        answers: Completions that have ended.
    """

    def __init__(self, client: Client, streams: int = 1) -> None:
        self.answers: list[Answer] = []
        self._client = client
        self._is_over = False
        self._task = asyncio.gather(*(self._ask(number % streams == 0) for number in range(4)))

    async def more(self, count: int, timeout: float = 120.0) -> None:
        """Wait until ``count`` more completions have ended."""
        wanted = len(self.answers) + count
        await until(lambda: len(self.answers) >= wanted, timeout, f"{wanted} completions")

    async def stop(self) -> None:
        """Let the clients finish their last completions."""
        self._is_over = True
        await self._task

    async def _ask(self, stream: bool) -> None:
        while not self._is_over:
            ask = Ask(self._client.text(30), TOKENS, stream=stream)
            self.answers.append(await self._client.ask(ask))


async def completions(client: Client, count: int) -> list[Answer]:
    """Return ``count`` completions, asked for at the same time."""
    return await client.ask_all([Ask(client.text(30), TOKENS) for _ in range(count)])


async def without_streams(exporter: ExporterProcess) -> Page:
    """Return the exporter's page once all streams have been closed."""
    return await settled_alone(exporter, lambda page: not value(page, "sidestep_streams"))


def zmq_threads(pids: Iterable[int]) -> Counter[str]:
    """Return the processes' threads that belong to ZeroMQ contexts, by name."""
    names = [
        task.read_text().strip()
        for pid in pids
        for task in Path(f"/proc/{pid}/task").glob("*/comm")
    ]
    return Counter(name for name in names if name.startswith("ZMQ"))
