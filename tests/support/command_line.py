"""The ``sidestep`` command as a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

ENVIRON = {
    **{key: value for key, value in os.environ.items() if not key.startswith("SIDESTEP_")},
    "SIDESTEP_SHUTDOWN_LINGER": "0",
}
"""Variables of a process that is stopped at once, since nothing scrapes it afterwards."""


def sidestep(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "sidestep", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**ENVIRON, **environ},
    )


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
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        found = re.search(r"http://\S+/metrics|metrics on no page", line)
        assert found, line
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
