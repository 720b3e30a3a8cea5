"""Servers of one model on one host, as processes that are started, killed and frozen in any order.

``REPLICAS=8 REPLICA_ROUNDS=3`` makes the long run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random

import pytest

from exporter_processes import process
from pages import get, parse
from ports import free_port

STEPS = 20
REPLICAS = int(os.environ.get("REPLICAS", "2"))
ROUNDS = int(os.environ.get("REPLICA_ROUNDS", "1"))
SEED = int(os.environ.get("REPLICA_SEED", "1"))
PROGRAM = Path(__file__).parents[1] / "support" / "replica.py"
HOST = socket.gethostname()


class Server:
    """A server process and its children, which end with it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, endpoint: str, *options: str) -> Server:
        """Start a server, and let each of its processes push steps."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SIDESTEP")}
        server = cls(
            await asyncio.create_subprocess_exec(
                sys.executable, PROGRAM, endpoint, *options,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                start_new_session=True, env={**environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        )  # fmt: skip
        server.push()
        return server

    def push(self) -> None:
        """Let each of its processes push steps."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % STEPS)

    async def saved(self) -> None:
        """Wait until the exporter has saved the steps."""
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        assert line == b"%d\n" % (2 * STEPS)

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes."""
        os.killpg(self.process.pid, number)


class Box:
    """A host with servers and an exporter with a state directory, which may be killed."""

    def __init__(self, folder: Path, *options: object) -> None:
        self.folder, self.options = folder, options
        self.servers: dict[int, Server] = {}
        self._exporter: contextlib.AsyncExitStack | None = None

    async def start_exporter(self) -> None:
        """Start the exporter; kill the one before."""
        await self.kill_exporter()
        self._exporter = contextlib.AsyncExitStack()
        exporter = process(self.folder, *self.options)
        _, self.url = await self._exporter.enter_async_context(exporter)

    async def kill_exporter(self) -> None:
        """Kill the exporter."""
        if self._exporter is not None:
            await self._exporter.aclose()
            self._exporter = None

    async def tokens(self) -> dict[str, float]:
        """Return the tokens of each series, by the label ``origin``."""
        page = parse(await get(self.url))
        found = page["vllm:generation_tokens"].samples if "vllm:generation_tokens" in page else {}
        return {dict(labels).get("origin", ""): value for (_, labels), value in found.items()}

    async def conflicts(self) -> float:
        """Return the conflicts of identities that the exporter has counted."""
        (found,) = parse(await get(self.url))["sidestep_identity_conflicts"].samples.values()
        return found


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    """Return a host without servers; what runs on it is killed in the end."""
    made = Box(tmp_path)
    yield made
    await made.kill_exporter()
    for server in made.servers.values():
        with contextlib.suppress(ProcessLookupError):
            server.signal(signal.SIGKILL)
        await server.process.wait()


async def run(box: Box, endpoint: str, options: Sequence[Sequence[str]]) -> None:
    """Start and restart servers in random orders, while the exporter is killed."""
    random = Random(SEED)
    await box.start_exporter()
    for turn in range(ROUNDS + 1):
        order = random.sample(range(len(options)), len(options))
        killed_at = random.choice(order)
        for number in order:
            if turn:
                box.servers[number].signal(signal.SIGKILL)
                await box.servers[number].process.wait()
            box.servers[number] = await Server.start(endpoint, *options[number])
            if turn and number == killed_at:
                await box.start_exporter()
        for server in box.servers.values():
            await server.saved()
        assert sum((await box.tokens()).values()) == 2 * STEPS * len(options) * (turn + 1)


async def test_servers_with_ports_have_series_of_their_own(box: Box) -> None:
    """Each continues its series over its restarts and the exporter's; nothing is set for it."""
    ports = [str(port) for port in range(8000, 8000 + REPLICAS)]
    endpoint = f"ipc://{box.folder}/i.ipc"
    await run(box, endpoint, [("--port", port) for port in ports])
    found = await box.tokens()

    assert set(found.values()) == {2 * STEPS * (ROUNDS + 1)}
    assert len(found) == REPLICAS
    assert "" in found
    assert found.keys() - {""} <= {f"{HOST}:{port}/m/0" for port in ports}
    assert await box.conflicts() == 0


async def test_servers_with_one_identity_are_all_counted(box: Box) -> None:
    """Also where nothing tells them apart; and the exporter says so."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    box.options = "--ingest.endpoint", endpoint
    await run(box, endpoint, [()] * REPLICAS)
    found = await box.tokens()

    others = {f"{HOST}~{number}/m/0" for number in range(2, REPLICAS + 1)}
    assert found.keys() <= {"", f"{HOST}/m/0"} | others
    assert len(found) == REPLICAS
    assert await box.conflicts() > 0


async def test_a_frozen_server_that_was_replaced_goes_on_as_another_one(box: Box) -> None:
    """Both push at the same time, and each step counts once."""
    endpoint = f"ipc://{box.folder}/i.ipc"
    await box.start_exporter()
    first = box.servers[0] = await Server.start(endpoint)
    await first.saved()
    first.signal(signal.SIGSTOP)
    second = box.servers[1] = await Server.start(endpoint)
    await second.saved()
    assert await box.tokens() == {"": 4 * STEPS}
    first.push()
    second.push()
    first.signal(signal.SIGCONT)
    await first.saved()
    await second.saved()

    assert await box.tokens() == {"": 6 * STEPS, f"{HOST}~2/m/0": 2 * STEPS}
    assert await box.conflicts() >= 1
