"""Prometheus processes in any role, as tests start, stop and ask them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

ROOT = Path(__file__).parents[1]
BINARIES = {
    "2": shutil.which("prometheus"),
    "3": shutil.which("prometheus", path=ROOT / "build" / "prometheus-3" / "usr" / "bin"),
}
"""Debian's, and a later Debian's (``make tools``)."""
AGENT = {"2": "--enable-feature=agent", "3": "--agent"}
Samples = list[tuple[float, float]]


def free_port() -> int:
    """One that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


class Process:
    """One Prometheus, which keeps its port and its directory when it is started again."""

    def __init__(self, binary: str, config: Path, *flags: str) -> None:
        self.port = free_port()
        self._command = [
            binary, f"--config.file={config}", f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=error", *flags,
        ]  # fmt: skip
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Return when it answers."""
        self._process = await asyncio.create_subprocess_exec(*self._command)
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if "Ready" in await self.get("/-/ready"):
                        return
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """As Kubernetes does."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()

    async def get(self, path: str, **params: str) -> str:
        """A page of it."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.port}{path}", params=params) as answer,
        ):
            return await answer.text()

    async def ask(self, query: str) -> list[dict[str, Any]]:
        """Series of an instant query."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(
                f"http://127.0.0.1:{self.port}/api/v1/query", params={"query": query}
            ) as answer,
        ):
            found: list[dict[str, Any]] = (await answer.json())["data"]["result"]
        return found

    async def samples(self, selector: str) -> dict[str, Samples]:
        """All that is stored of a series in the last ten minutes, by instance."""
        return {
            one["metric"]["instance"]: [(at, float(value)) for at, value in one["values"]]
            for one in await self.ask(f"{selector}[10m]")
        }

    async def until(self, query: str, holds: Callable[[Mapping[str, float]], bool]) -> None:
        """Return when an instant query's values by instance are so."""
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(aiohttp.ClientError, KeyError):
                    found = {
                        one["metric"].get("instance", ""): float(one["value"][1])
                        for one in await self.ask(query)
                    }
                    if holds(found):
                        return
                await asyncio.sleep(0.05)


def binaries() -> Iterator[tuple[str, str | None]]:
    """Versions with where they are, if they are."""
    yield from BINARIES.items()
