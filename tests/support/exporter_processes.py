"""Exporters with a state directory, as processes that a test may kill."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path


@contextlib.asynccontextmanager
async def process(
    folder: Path, *options: object
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run an exporter process with its files in ``folder``; yield it and the URL of its page."""
    exporter = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sidestep", "serve",
        "--web.listen-address", "127.0.0.1:0", "--state.dir", str(folder / "state"),
        "--ingest.endpoint", f"ipc://{folder}/i.ipc", "--log.stats-interval", "0", *map(str, options),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert exporter.stderr is not None
    try:
        url, output = None, ""
        while url is None:
            line = (await asyncio.wait_for(exporter.stderr.readline(), 30)).decode()
            assert line, f"the exporter has ended: {output}"
            output += line
            url = re.search(r"http://\S+/metrics", line)
        yield exporter, url[0]
    finally:
        if exporter.returncode is None:
            exporter.kill()
        await exporter.wait()
