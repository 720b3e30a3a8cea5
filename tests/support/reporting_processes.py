"""A process that says of one engine's progress what a test sets, over a real connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from sidestep.app.exporter import Exporter
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import CORE, EngineInfo, Heartbeat, Hello
from sidestep.protocol.progress import Progress
from socket_peers import Peer, connect

WORKING = Progress(0, steps=5, unfinished=2, step_age=0.05, longest=0.05, longest_tokens=8)
PERIOD = 0.1


class Process:
    """A process with a stream of its own."""

    def __init__(self, peer: Peer, incarnation: int) -> None:
        self.progress = [WORKING]
        self.peer = peer
        self.incarnation = incarnation

    async def beat(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            await self.peer.send(Heartbeat(self.incarnation, 0, 0, progress=self.progress))
            await asyncio.sleep(PERIOD)


@contextlib.asynccontextmanager
async def process(
    exporter: Exporter | str,
    engine: str = "ns/m/0",
    stream: str = "core",
    incarnation: int = 1,
    role: str = CORE,
) -> AsyncIterator[Process]:
    """Run a process that falls silent after the block, as if it had been killed."""
    async with connect(exporter) as peer:
        info = EngineInfo(engine, "vllm", {"engine": engine, "model_name": "m"}, role=role)
        await peer.greet(Hello(VERSION, stream, incarnation, 1, 1, [info]))
        made = Process(peer, incarnation)
        beating = asyncio.create_task(made.beat())
        try:
            yield made
        finally:
            beating.cancel()
            await asyncio.wait({beating})
