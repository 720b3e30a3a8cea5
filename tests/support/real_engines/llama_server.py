"""A real llama-server with a tiny model, which tools/setup_llamacpp.sh puts into build/llamacpp."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from exporters import until
from ports import free_port

FOLDER = Path(os.environ.get("SIDESTEP_LLAMACPP", Path(__file__).parents[3] / "build" / "llamacpp"))


class LlamaProcess:
    """A llama-server of this machine.

    Args:
        folder: Its working directory, for its log.
        options: Further options.
        model: Whether it serves the tiny model; a router has none of its own.
    """

    def __init__(self, folder: Path, *options: str, model: bool = True) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        own = ("-m", str(FOLDER / "model.gguf"), "--alias", "tiny") if model else ()
        self._command = [
            str(FOLDER / "server"), *own, "--host", "127.0.0.1", "--port", str(self.port),
            "--offline", "--metrics", "--threads", "1", *options,
        ]  # fmt: skip
        self._log = folder / "llama.log"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it, and wait until it serves."""
        self._process = await asyncio.to_thread(self._run)
        await until(self._serves, what=f"see {self._log}")

    def _run(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log)

    async def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)
            self._process = None

    async def _serves(self) -> bool:
        try:
            await self.get("/health")
        except aiohttp.ClientError:
            return False
        return True

    async def get(self, path: str) -> str:
        """Return the answer to a request."""
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.get(self.url + path) as answer,
        ):
            return await answer.text()

    async def ask(self, path: str = "/completion", **fields: Any) -> dict[str, Any]:
        """Return the answer to a question in JSON."""
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.post(self.url + path, json=fields) as answer,
        ):
            found: dict[str, Any] = json.loads(await answer.read())
            return found

    async def sleeps(self) -> bool:
        """Return whether its model sleeps."""
        return bool(json.loads(await self.get("/props"))["is_sleeping"])


@asynccontextmanager
async def llama_process(
    folder: Path, *options: str, model: bool = True
) -> AsyncIterator[LlamaProcess]:
    """Run a server."""
    server = LlamaProcess(folder, *options, model=model)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
