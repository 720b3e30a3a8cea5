"""A fake of Triton's HTTP server: it counts as Triton does, and a test can replace any answer."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import polled
from exporters import DATA
from polled import Polled

Says = Callable[[asyncio.StreamWriter], Awaitable[None]]
PARTS = ("compute_input", "compute_infer", "compute_output")
STAGES = ("success", "fail", "queue", *PARTS, "cache_hit", "cache_miss")
JSON = "application/json"
STATS = "/v2/models/stats"
PAGE = "/metrics"
"""Path of the metrics page, here on the same port as the API."""


def recording(name: str) -> bytes:
    """Read a recording of ``tests/data/triton``."""
    return gzip.decompress((DATA / "triton" / f"{name}.gz").read_bytes())


def answer(body: bytes, status: str = "200 OK", kind: str = JSON) -> bytes:
    """Return a whole answer with ``body``, JSON unless ``kind`` says otherwise."""
    return polled.answer(body, status, kind)


def error(status: str, text: str) -> bytes:
    """Return an answer with Triton's error body."""
    return answer(json.dumps({"error": text}).encode(), status)


class Model:
    """Statistics of one model version since it was loaded."""

    def __init__(self) -> None:
        self.last_inference = self.inference_count = self.execution_count = 0
        self.stages = {name: [0, 0] for name in STAGES}
        self.batches: dict[int, list[list[int]]] = {}

    def infer(self, requests: int = 1, size: int = 1, now: int = 1) -> None:
        """Count requests, each an execution of ``size``."""
        self.last_inference = max(self.last_inference, now)
        self.inference_count += requests * size
        self.execution_count += requests
        for name in ("success", "queue", *PARTS):
            self._add(self.stages[name], requests)
        for part in self.batches.setdefault(size, [[0, 0] for _ in PARTS]):
            self._add(part, requests)

    def fail(self, requests: int = 1) -> None:
        """Count requests whose execution failed."""
        self._add(self.stages["fail"], requests)

    def hit(self, requests: int = 1) -> None:
        """Count requests that the response cache answered."""
        for name in ("success", "queue", "cache_hit"):
            self._add(self.stages[name], requests)

    def reported(self, name: str, version: str) -> dict[str, Any]:
        """Return its entry of ``model_stats``."""
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
    def _add(counted: list[int], requests: int) -> None:
        counted[0] += requests
        counted[1] += requests * 1000


def timed(counted: list[int]) -> dict[str, int]:
    """Return a count and nanoseconds in Triton's form."""
    return {"count": counted[0], "ns": counted[1]}


class Triton(Polled):
    """Triton's HTTP API over models that a test loads.

    Attributes:
        models: Ready models by name and version.
        configs: Configurations by model name; other models have an empty one.
        instead: Replacements of an answer, by path.
        asked: Requests by path.
    """

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.models: dict[tuple[str, str], Model] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.instead: dict[str, Says] = {}
        self.asked: Counter[str] = Counter()

    def load(self, name: str = "m", version: str = "1") -> Model:
        """Load a version of a model, with empty statistics."""
        model = self.models[name, version] = Model()
        return model

    def respond(self, path: str, *parts: bytes, stall: bool = False) -> None:
        """Replace the answer at ``path`` by these bytes; then close, or stall the connection."""

        async def write(writer: asyncio.StreamWriter) -> None:
            for part in parts:
                writer.write(part)
            await writer.drain()
            while stall and self.instead.get(path) is write and not writer.transport.is_closing():
                await asyncio.sleep(0.01)

        self.instead[path] = write

    def body(self, method: str, path: str) -> bytes:
        """Return the answer to a request."""
        parts = path.partition("?")[0].removeprefix("/v2").split("/")[1:]
        found: object
        match method, parts:
            case "GET", ["models", "stats"]:
                found = self._stats(sorted(self.models))
            case "GET", ["models", name, "stats"] | ["models", name, "versions", _, "stats"]:
                versions = parts[3:4] or [version for _, version in self.models]
                named = sorted(key for key in self.models if key[0] == name and key[1] in versions)
                if not named:
                    return error("400 Bad Request", f"requested model '{name}' is not available")
                found = self._stats(named)
            case "GET", ["models", name, "config"]:
                if not any(key[0] == name for key in self.models):
                    return error(
                        "400 Bad Request", f"Request for unknown model: '{name}' is not found"
                    )
                found = self.configs.get(name, {"name": name})
            case _:
                return recording("err_bad_path.http")
        return answer(json.dumps(found).encode())

    def _stats(self, keys: list[tuple[str, str]]) -> dict[str, Any]:
        return {"model_stats": [self.models[key].reported(*key) for key in keys]}

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, path, _version = self.heads[-1].split(" ", 2)
        self.asked[path] += 1
        instead = self.instead.get(path)
        if instead is None:
            # Requests that arrived together are answered together.
            await asyncio.sleep(0)
            writer.write(self.body(method, path))
        else:
            await instead(writer)
            writer.close()


@contextlib.asynccontextmanager
async def tritons(*names: str) -> AsyncIterator[Triton]:
    """Run a server with version 1 of each of these models."""
    found = Triton()
    for name in names:
        found.load(name)
    await found.start()
    try:
        yield found
    finally:
        await found.stop()
