"""A Triton server that is none: it counts and answers as the recorded one did, or as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from exporters import DATA

Says = Callable[[asyncio.StreamWriter], Awaitable[None]]
PARTS = ("compute_input", "compute_infer", "compute_output")
STAGES = ("success", "fail", "queue", *PARTS, "cache_hit", "cache_miss")
JSON = "application/json"
STATS = "/v2/models/stats"
PAGE = "/metrics"
"""Here on the same port."""


def recording(name: str) -> bytes:
    """One of ``tests/data/triton``."""
    return gzip.decompress((DATA / "triton" / f"{name}.gz").read_bytes())


def answer(body: bytes, status: str = "200 OK", kind: str = JSON) -> bytes:
    """A whole answer."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def error(status: str, text: str) -> bytes:
    """As Triton says that it will not."""
    return answer(json.dumps({"error": text}).encode(), status)


class Model:
    """What one version has counted since it was loaded."""

    def __init__(self) -> None:
        self.last_inference = self.inference_count = self.execution_count = 0
        self.stages = {name: [0, 0] for name in STAGES}
        self.batches: dict[int, list[list[int]]] = {}

    def infer(self, requests: int = 1, size: int = 1, ns: int = 1000, now: int = 1) -> None:
        """So many requests, each an execution of ``size`` that took ``ns`` in each of its parts."""
        self.last_inference = max(self.last_inference, now)
        self.inference_count += requests * size
        self.execution_count += requests
        for name in ("success", "queue", *PARTS):
            self._add(self.stages[name], requests, ns)
        for part in self.batches.setdefault(size, [[0, 0] for _ in PARTS]):
            self._add(part, requests, ns)

    def fail(self, requests: int = 1, ns: int = 1000) -> None:
        """Requests that an execution could not serve."""
        self._add(self.stages["fail"], requests, ns)

    def hit(self, requests: int = 1, ns: int = 100) -> None:
        """Requests that the response cache answered: nothing was executed."""
        for name in ("success", "queue", "cache_hit"):
            self._add(self.stages[name], requests, ns)

    def told(self, name: str, version: str) -> dict[str, Any]:
        """One of ``model_stats``."""
        return {
            "name": name,
            "version": version,
            "last_inference": self.last_inference,
            "inference_count": self.inference_count,
            "execution_count": self.execution_count,
            "inference_stats": {stage: timed(one) for stage, one in self.stages.items()},
            "response_stats": {},
            "batch_stats": [
                {"batch_size": size, **dict(zip(PARTS, map(timed, parts), strict=True))}
                for size, parts in sorted(self.batches.items())
            ],
            "memory_usage": [],
        }

    @staticmethod
    def _add(counted: list[int], requests: int, ns: int) -> None:
        counted[0] += requests
        counted[1] += requests * ns


def timed(counted: list[int]) -> dict[str, int]:
    """Count and nanoseconds."""
    return {"count": counted[0], "ns": counted[1]}


class Triton:
    """A server on a port that stays the same over its restarts.

    Attributes:
        models: By name and version; only these are ready.
        configs: By name; others have an empty one.
        namespaced: Whether it runs with ``--model-namespacing``.
        extensions: What it says that it can do.
        instead: What it does in place of its answer, by path.
        asked: How often each path was asked for.
        busy: Questions under way; ``most`` at once so far.
        heads: Of all requests.
    """

    def __init__(self) -> None:
        self.models: dict[tuple[str, str], Model] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.namespaced = False
        self.extensions = ["model_repository", "statistics", "trace"]
        self.instead: dict[str, Says] = {}
        self.asked: Counter[str] = Counter()
        self.heads: list[str] = []
        self.busy = self.most = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def load(self, name: str = "m", version: str = "1") -> Model:
        """A version of a model, loaded anew."""
        model = self.models[name, version] = Model()
        return model

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """End as by SIGKILL: the port refuses, connections are reset, nothing is kept."""
        if self._server is not None:
            self._server.close()
        # One that was accepted a moment ago is not known yet.
        await asyncio.sleep(0.01)
        while self._open:
            for writer in list(self._open):
                writer.transport.abort()
            await asyncio.sleep(0.005)
        self._server = None

    def say(self, path: str, *parts: bytes, stall: bool = False) -> None:
        """Say this in place of an answer; then hang up, or keep silent."""

        async def say(writer: asyncio.StreamWriter) -> None:
            for part in parts:
                writer.write(part)
            await writer.drain()
            while stall and self.instead.get(path) is say and not writer.transport.is_closing():
                await asyncio.sleep(0.01)

        self.instead[path] = say

    def body(self, method: str, path: str) -> bytes:
        """The answer to a question."""
        parts = path.partition("?")[0].removeprefix("/v2").split("/")[1:]
        found: object
        match method, parts:
            case "GET", []:
                found = {"name": "fake", "version": "2.51.0", "extensions": self.extensions}
            case "GET", ["models", "stats"]:
                if self.namespaced:
                    return error(
                        "400 Bad Request", "Request for unknown model: '/r::m' is not found"
                    )
                found = self._stats(sorted(self.models))
            case "GET", ["models", name, "stats"]:
                named = sorted(key for key in self.models if key[0] == name)
                if not named:
                    return error("400 Bad Request", f"requested model '{name}' is not available")
                found = self._stats(named)
            case "GET", ["models", name, "config"]:
                if not any(key[0] == name for key in self.models):
                    return error(
                        "400 Bad Request", f"Request for unknown model: '{name}' is not found"
                    )
                found = self.configs.get(name, {"name": name})
            case "POST", ["repository", "index"]:
                found = [{"name": n, "version": v, "state": "READY"} for n, v in self.models]
                found.append({"name": "unloaded", "version": "1", "state": "UNAVAILABLE"})
            case _:
                return recording("err_bad_path.http")
        return answer(json.dumps(found).encode())

    def _stats(self, keys: list[tuple[str, str]]) -> dict[str, Any]:
        return {"model_stats": [self.models[key].told(*key) for key in keys]}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                self.heads.append(head)
                self.asked[path] += 1
                self.busy += 1
                self.most = max(self.most, self.busy)
                try:
                    instead = self.instead.get(path)
                    if instead is None:
                        await asyncio.sleep(0.001)
                        writer.write(self.body(method, path))
                        await writer.drain()
                    else:
                        await instead(writer)
                finally:
                    self.busy -= 1
                if instead is not None or "connection: close" in head.lower():
                    break
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        self._open.discard(writer)


@contextlib.asynccontextmanager
async def tritons(*names: str) -> AsyncIterator[Triton]:
    """A running one with a version 1 of each of these models."""
    found = Triton()
    for name in names:
        found.load(name)
    await found.start()
    try:
        yield found
    finally:
        await found.stop()
