"""Connections to an exporter's ingest endpoint over which a test sends any message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import zmq
import zmq.asyncio

from sidestep.app.exporter import Exporter
from sidestep.engines.items import Item, encode_item
from sidestep.engines.vllm.wire import VllmStep
from sidestep.metrics.computed_gauges import scalar
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import (
    Ack,
    Batch,
    EngineInfo,
    FromExporter,
    FromSender,
    Heartbeat,
    Hello,
    decode_from_exporter,
    encode,
)
from sidestep.transport.keys import public_of


class Peer:
    """A connection that sends and receives single messages."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.socket = socket

    async def send(self, *frames: bytes | FromSender) -> None:
        """Send one message."""
        await self.socket.send_multipart(
            [frame if isinstance(frame, bytes) else encode(frame) for frame in frames]
        )

    async def receive(self) -> FromExporter:
        """Return the exporter's next message."""
        return decode_from_exporter(await asyncio.wait_for(self.socket.recv(), 10))

    async def greet(self, hello: Hello) -> FromExporter:
        """Repeat ``hello`` until it is answered: another process that has its ids may be alive."""
        while True:
            await self.send(hello)
            with contextlib.suppress(asyncio.TimeoutError):
                return decode_from_exporter(await asyncio.wait_for(self.socket.recv(), 0.5))

    async def send_hello(self, stream: str = "s", incarnation: int = 1, engines: int = 1) -> Ack:
        """Open a stream that holds nothing, and return the exporter's answer."""
        infos = [
            EngineInfo(f"{stream}{n}", "vllm", {"engine": f"{stream}{n}", "model_name": "m"})
            for n in range(engines)
        ]
        answer = await self.greet(Hello(VERSION, stream, incarnation, 1, 1, infos))
        assert isinstance(answer, Ack)
        await self.send(Heartbeat(incarnation, 0, 0))
        return answer


@asynccontextmanager
async def connect(
    exporter: Exporter | str, secret: bytes | None = None, server_key: str = ""
) -> AsyncIterator[Peer]:
    """Connect to an exporter or its endpoint; with CURVE keys if there is a ``secret``."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if secret is not None:
        socket.curve_publickey, socket.curve_secretkey = public_of(secret), secret
        socket.curve_serverkey = server_key.encode()
    socket.connect(exporter if isinstance(exporter, str) else exporter.endpoints[0])
    try:
        yield Peer(socket)
    finally:
        socket.close()
        context.term()


def step(engine: int = 0, tokens: int = 1) -> Item:
    """Return a step that generated ``tokens``."""
    return VllmStep(engine, 1.0, 1.0, None, IterationStats(num_generation_tokens=tokens))


def batch(first: int, *items: bytes | Item, incarnation: int = 1) -> Batch:
    """Return a batch whose first item has the sequence number ``first``."""
    raw = [i if isinstance(i, bytes) else encode_item(i) for i in items]
    return Batch(incarnation, first, [msgspec.Raw(data) for data in raw])


def tokens(exporter: Exporter, engine: str = "s0") -> int:
    """Return the generated tokens that the exporter has counted for ``engine``."""
    return int(scalar(exporter.registry.engines[engine], "vllm:generation_tokens_total"))
