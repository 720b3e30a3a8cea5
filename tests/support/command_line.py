"""The ``sidestep`` command in a process of its own."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import IO

ENVIRON = {
    **{key: value for key, value in os.environ.items() if not key.startswith("SIDESTEP_")},
    "SIDESTEP_SHUTDOWN_LINGER": "0",
}
"""Variables of a process that is stopped at once, since nothing scrapes it afterwards."""


SERVER = """
import json, os, sys, traceback
import sidestep.app.run, sidestep.app.cli, sidestep_tools.commands
import sidestep_tools.compare.command, sidestep_tools.inject.command, sidestep_tools.run
import sidestep_tools.doctor.command, sidestep_tools.whatif.command

def run(order):
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(order["files"], 1):
        os.dup2(os.open(name, os.O_WRONLY), number)
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    try:
        sidestep.app.cli.main(order["arguments"])
    except SystemExit as end:
        return int(end.code or 0)

for line in sys.stdin:
    child = os.fork()
    if not child:
        code = 1
        try:
            code = run(json.loads(line))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A process that has imported the commands, and runs each in a fork of itself."""


class Commands:
    """Commands that run one after the other, without the start of an interpreter for each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[str] | None = None

    def run(self, arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str, str]:
        """Run a command to its end; return its exit code and its output."""
        with self._lock, tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("stdout", "stderr")]
            for file in files:
                file.touch()
            order = {
                "arguments": arguments, "environ": dict(environ), "directory": str(Path.cwd()),
                "files": [*map(str, files)],
            }  # fmt: skip
            pipes = self._pipes()
            pipes[0].write(f"{json.dumps(order)}\n")
            pipes[0].flush()
            code = int(pipes[1].readline())
            stdout, stderr = (file.read_bytes().decode() for file in files)
        return code, stdout, stderr

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        """Return the input and the output of the server, which starts with the first command."""
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-c", SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=ENVIRON,
            )
            atexit.register(self._server.kill)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        return self._server.stdin, self._server.stdout


COMMANDS = Commands()


def sidestep(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    words = [*map(str, arguments)]
    return subprocess.CompletedProcess(words, *COMMANDS.run(words, {**ENVIRON, **environ}))


@contextlib.asynccontextmanager
async def serving(
    *arguments: object, **environ: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run a command that serves; yield its process and the URL that it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sidestep", *map(str, arguments),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env={**ENVIRON, **environ},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        found, output = None, ""
        while found is None:
            line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
            output += line
            assert line, f"the command has ended: {output}"
            found = re.search(r"http://\S+/metrics|metrics on no page", line)
        yield process, found[0]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def taken_port() -> tuple[socket.socket, int]:
    """Return a listening socket and its port."""
    held = socket.create_server(("127.0.0.1", 0))
    return held, held.getsockname()[1]


def one_line(done: subprocess.CompletedProcess[str], code: int, what: str) -> None:
    """Assert that the command ended with ``code`` and one line that contains ``what``."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("sidestep: ")
    assert what in line
