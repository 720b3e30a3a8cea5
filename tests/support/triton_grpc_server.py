"""A fake of Triton's gRPC server in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from sidestep_adapters.triton.proto import MESSAGES

Context = grpc.aio.ServicerContext[bytes, bytes]
SERVICE = "inference.GRPCInferenceService"
METHODS = ("ModelStatistics", "ServerMetadata", "ModelConfig", "RepositoryIndex")


class FakeTriton:
    """Answers by method, and the requests received.

    Attributes:
        answers: Encoded message, or a status and its text, by method.
        stalls: Answer no request while this is True.
        asked: Method, message and metadata of each request.
    """

    def __init__(self) -> None:
        self.port = 0
        self.stalls = False
        self.answers: dict[str, bytes | tuple[grpc.StatusCode, str]] = {}
        self.asked: list[tuple[str, Any, Mapping[str, str | bytes]]] = []

    def answer(self, method: str, **fields: Any) -> None:
        """Set the answer of a method to a message of these fields."""
        self.answers[method] = MESSAGES[f"{method}Response"](**fields).SerializeToString()

    def handler(self, method: str) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Return the handler of a method."""

        async def take(question: bytes, context: Context) -> bytes:
            metadata = dict(context.invocation_metadata() or ())
            self.asked.append((method, MESSAGES[f"{method}Request"].FromString(question), metadata))
            while self.stalls:
                await asyncio.sleep(0.01)
            found = self.answers.get(method, (grpc.StatusCode.UNIMPLEMENTED, "none"))
            if isinstance(found, tuple):
                await context.abort(*found)
            return found

        behaviour: Callable[[bytes, Context], Awaitable[bytes]] = take
        return grpc.unary_unary_rpc_method_handler(behaviour)


@asynccontextmanager
async def serving(
    triton: FakeTriton, credentials: grpc.ServerCredentials | None = None, port: int = 0
) -> AsyncIterator[str]:
    """Run the server; yield its ``HOST:PORT``."""
    server = grpc.aio.server()
    handlers = {method: triton.handler(method) for method in METHODS}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    host = f"127.0.0.1:{port}"
    if credentials is None:
        triton.port = server.add_insecure_port(host)
    else:
        triton.port = server.add_secure_port(host, credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{triton.port}"
    finally:
        await server.stop(0)
