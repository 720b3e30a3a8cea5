"""Exporters with a state directory, as processes that a test may kill."""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from command_line import serving


def process(
    folder: Path, *options: object
) -> AbstractAsyncContextManager[tuple[asyncio.subprocess.Process, str]]:
    """Run an exporter process with its files in ``folder``; yield it and the URL of its page."""
    return serving(
        "serve", "--web.listen-address", "127.0.0.1:0", "--state.dir", folder / "state",
        "--ingest.endpoint", f"ipc://{folder}/i.ipc", "--log.stats-interval", "0", *options,
        PYTHONPATH=os.environ.get("PYTHONPATH", ""),
    )  # fmt: skip
