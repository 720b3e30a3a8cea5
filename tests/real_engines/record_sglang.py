"""A program that records runs of a real SGLang and their pages.

``PYTHONPATH=tests/support .venv/bin/python tests/real_engines/record_sglang.py NAME...``. An
idle SGLang continues to count: the recording is cut where both pages were the same.
"""

from __future__ import annotations

import asyncio
import gzip
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from exporters import recorded_run, until
from real_engines.comparison import Page, all_differences, idle, parse
from real_engines.load import Client
from real_engines.processes import ExporterProcess
from real_engines.sglang_runs import LABELLED, MIXED, PARALLEL, Run
from real_engines.sglang_server import SglangServer, interpreter
from real_engines.tiny_model import make_model
from sidestep_adapters.recording.format import Writer, read
from sidestep_adapters.recording.recorder import Tee

RUNS = {"sglang": MIXED, "sglang_dp": PARALLEL, "sglang_labels": LABELLED}
DATA = Path(__file__).parents[1] / "data"
SETTLE = 120.0


async def record(name: str, run: Run, home: Path) -> None:
    """Record ``run`` in ``home`` and store it as ``name`` in the test data."""
    model = make_model(home / "tiny")
    endpoint, recorded = f"ipc://{home}/ingest.ipc", home / "whole.rec"
    environ = {
        "SIDESTEP_ENDPOINT": f"ipc://{home}/tee.ipc",
        "SIDESTEP_NAMESPACE": "recorded",
        **run.environ,
    }
    server = SglangServer(interpreter(), model, home, run.arguments, environ)
    stop = threading.Event()
    started = time.monotonic()
    tee = Tee(environ["SIDESTEP_ENDPOINT"], endpoint, recorded)
    recording = threading.Thread(target=tee.run, args=(stop,))
    recording.start()
    try:
        async with ExporterProcess(endpoint, home / "exporter.log") as exporter, server:
            await exporter.started()
            await server.started()
            async with Client(server.base) as client:
                await run.load(client)
            text, end = "", 0.0

            async def same() -> bool:
                nonlocal text, end
                text = await server.page()
                ours: Page = parse(await exporter.page())
                end = time.monotonic() - started
                theirs = parse(text)
                # A request for its page counts on it: without a pause it would stay ahead of ours.
                await asyncio.sleep(0.2)
                return idle(theirs) and not list(all_differences(theirs, ours))

            await until(same, SETTLE, "pages that are the same")
    finally:
        stop.set()
        recording.join()
    writer = Writer(home / "cut.rec")
    for entry in read(recorded):
        if entry.at <= end:
            writer.write(entry)
    writer.close()
    cut = (home / "cut.rec").read_bytes()
    recorded_run(name).write_bytes(gzip.compress(cut, mtime=0))
    (DATA / f"page_{name}.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    """Record the runs named on the command line, or all."""
    for name in sys.argv[1:] or RUNS:
        home = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
        try:
            asyncio.run(record(name, RUNS[name], home))
        finally:
            shutil.rmtree(home)


if __name__ == "__main__":
    main()
