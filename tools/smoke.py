"""Try an installation: every module, the help of every command, and an engine replayed to an exporter.

Run it with the Python of the installation; it needs nothing else. It raises if anything fails.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from click import Context

import sidestep
import sidestep_adapters
import sidestep_tools
from sidestep.app.cli import cli
from sidestep.app.demo import recording

SIDESTEP = [sys.executable, "-m", "sidestep"]
ENGINES = ("vllm", "sglang", "torch")
"""Packages that come with an engine."""
FORMATS = (
    "text/plain",
    "application/openmetrics-text; version=1.0.0",
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited",
)


def load_modules() -> None:
    """Import every module; some of the adapters import their engine, which may be missing."""
    for package in (sidestep, sidestep_tools, sidestep_adapters):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in ENGINES:
                    raise


def run(*arguments: object) -> str:
    """Return what a command prints; it must end with 0."""
    command = [*SIDESTEP, *map(str, arguments)]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=60).stdout


def scrape(url: str, accepted: str) -> bytes:
    """Return a compressed page in the format that ``accepted`` asks for."""
    headers = {"Accept": accepted, "Accept-Encoding": "gzip"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as page:
        assert page.headers["Content-Encoding"] == "gzip", page.headers
        assert page.headers["Content-Type"].startswith(accepted.partition(";")[0]), page.headers
        return bytes(page.read())


def exercise(url: str, ingest: str, folder: Path) -> None:
    """Replay an engine to the exporter, and look at it in every way."""
    run("replay", recording("vllm-full.rec.gz"), "--connect", ingest, "--speed", "max")
    pages = [scrape(url, accepted) for accepted in FORMATS]
    assert all(pages), [*map(len, pages)]
    root = url.removesuffix("/metrics")
    (target,) = json.loads(run("top", "--json", root))["targets"]
    assert [engine["model"] for engine in target["engines"]] == ["tiny"], target
    assert "tiny" in run("top", "--once", root)
    run("doctor", "--fail-on", "error", root)
    trace = folder / "trace.jsonl"
    trace.write_text('{"hash_ids": [1, 2, 3]}\n{"hash_ids": [1, 2, 4]}\n')
    run("whatif", trace, "--sample-rate", "1", "--capacity", "1,2", "--plot", folder / "curve.svg")
    run_of_core = recording("vllm-aborts.rec.gz")
    assert "no difference seen" in run("compare", run_of_core, run_of_core)
    run("keygen", "key", "--out", folder)


def main() -> None:
    """Try everything."""
    load_modules()
    for command in cli.list_commands(Context(cli)):
        assert "Usage:" in run(command, "--help")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        ingest = f"ipc://{folder}/ingest/ingest.ipc"
        flags = ["--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", ingest]
        flags += ["--state.dir", f"{folder}/state", "--histograms", "both"]
        serving = subprocess.Popen([*SIDESTEP, "serve", *flags], text=True, stderr=subprocess.PIPE)
        try:
            assert serving.stderr is not None
            found = re.search(r"http://\S+/metrics", serving.stderr.readline())
            assert found, "the exporter does not start"
            exercise(found[0], ingest, folder)
        finally:
            serving.terminate()
            serving.wait(30)
        assert serving.returncode == 0, serving.returncode


if __name__ == "__main__":
    main()
