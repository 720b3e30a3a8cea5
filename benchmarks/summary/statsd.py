"""The peer statsd_exporter, fed with the same latencies as timers over a Unix socket.

A datagram has 32 lines of one value each, with tags, which all versions parse. A Unix socket
makes the sender wait, so nothing is lost; over UDP most would be.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.process import cpu_seconds, free_port, totals
from benchmarks.steps import Steps
from sidestep.catalog.buckets import DEFAULTS
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.dialects import DIALECTS

NAME = "statsd_exporter"
VARIABLE = "STATSD_EXPORTER"
ABSENT = f"absent: neither on the path nor named by {VARIABLE}"
METRIC = "vllm:inter_token_latency_seconds"
ENGINES = 16
LINES = 32
PATIENCE = 30.0


def binary() -> str | None:
    """Return the path of statsd_exporter, if it is installed."""
    return os.environ.get(VARIABLE) or shutil.which(NAME)


def per_core(path: str, values: int) -> float:
    """Return values per second of its CPU time, once all of ``values`` have arrived."""
    with tempfile.TemporaryDirectory(prefix="bench-statsd-") as folder:
        web = f"127.0.0.1:{free_port()}"
        inlet = str(Path(folder, "statsd.sock"))
        process = subprocess.Popen(
            [
                path,
                f"--web.listen-address={web}",
                f"--statsd.listen-unixgram={inlet}",
                "--statsd.listen-udp=",
                "--statsd.listen-tcp=",
                f"--statsd.mapping-config={mapping(Path(folder, 'mapping.yml'))}",
                "--log.level=error",
            ],
            env={**os.environ, "GOMAXPROCS": "1"},
        )
        try:
            return fed(process.pid, f"http://{web}/metrics", inlet, values)
        finally:
            process.terminate()
            process.wait(timeout=10.0)


def mapping(path: Path) -> Path:
    """Write a mapping that turns timers into a histogram with vLLM's bounds."""
    bounds = next(
        row.bounds or DEFAULTS[row.buckets]
        for row in compile_layout(DIALECTS["vllm"]).histograms
        if row.name == METRIC
    )
    path.write_text(
        "mappings:\n- match: itl\n  name: itl_seconds\n  observer_type: histogram\n"
        f"  histogram_options:\n    buckets: [{', '.join(map(repr, bounds))}]\n",
        encoding="utf-8",
    )
    return path


def fed(pid: int, page: str, inlet: str, values: int) -> float:
    """Send all values, wait until they have arrived, and return values per CPU second."""
    deadline = time.monotonic() + PATIENCE
    while not Path(inlet).exists() or arrived(page) is None:
        if time.monotonic() > deadline:
            raise SystemExit(f"{NAME} does not start")
        time.sleep(0.05)
    packets = list(datagrams())
    before = cpu_seconds(pid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.connect(inlet)
        count = values // LINES
        for packet in itertools.islice(itertools.cycle(packets), count):
            out.send(packet)
    deadline = time.monotonic() + PATIENCE
    while (arrived(page) or 0.0) < count * LINES:
        if time.monotonic() > deadline:
            raise SystemExit(f"{NAME} has {arrived(page):.0f} of {count * LINES} values")
        time.sleep(0.1)
    return count * LINES / (cpu_seconds(pid) - before)


def datagrams() -> Iterator[bytes]:
    """Yield datagrams with latencies of recorded steps, of several engines."""
    steps = Steps()
    for number in range(64 * ENGINES):
        found = steps.iteration(LINES, 0).inter_token_latencies_iter
        lines = (f"itl:{value * 1e3:.3f}|ms|#engine:{number % ENGINES}" for value in found)
        yield "\n".join(lines).encode()


def arrived(page: str) -> float | None:
    """Return the values on its page, or None while it does not answer."""
    try:
        with urllib.request.urlopen(page, timeout=10.0) as response:
            return totals(response.read().decode()).get("itl_seconds_count", 0.0)
    except (urllib.error.URLError, ConnectionError):
        return None
