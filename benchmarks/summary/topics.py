"""All topics of the table; each is measured in a process of its own.

No topic depends on memory, caches or libraries of another one, and the topic of an engine
runs with the interpreter of the engine's environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.process import own_output
from benchmarks.summary.rows import Figure, Topic

ROOT = Path(__file__).parents[2]
TOPICS: Mapping[str, str] = {
    "engine": "engine:CLIENT",
    "vllm": "engine:VLLM",
    "loop": "loop:LOOP",
    "core": "scheduler:SCHEDULER",
    "tap": "tap:TAP",
    "sglang": "sglang:SGLANG",
    "sglang-loop": "sglang_loop:SGLANG_LOOP",
    "ingest": "ingest:INGEST",
    "events": "events:EVENTS",
    "blocks": "blocks:BLOCKS",
    "multiprocess": "multiprocess:MULTIPROCESS",
    "scrape": "scrape:SCRAPE",
    "http": "scrape_http:HTTP",
    "bytes": "sizes:SIZES",
    "memory": "memory:MEMORY",
    "load": "load:LOAD",
    "routers": "routers:ROUTERS",
    "live": "viewers:VIEWS",
    "top": "top_pages:TOP",
    "otlp": "otlp_pushes:OTLP",
    "spans": "otlp_spans:OTLP_SPANS",
}
"""Module and constant of each topic; modules are imported when they are needed."""


FAILED = "failed"
"""Start of the reason for a measurement that could not be made."""


def topic(name: str) -> Topic:
    """Return the topic of that name."""
    module, _, constant = TOPICS[name].partition(":")
    found = getattr(importlib.import_module(f"benchmarks.summary.{module}"), constant)
    if not isinstance(found, Topic):
        raise TypeError(f"{TOPICS[name]} is no topic")
    return found


def measured(name: str, *, quick: bool) -> Mapping[str, Figure]:
    """Measure a topic in a process; a row without a figure has the reason."""
    chosen = topic(name)
    python = interpreter(chosen)
    if python is None:
        return missing(chosen, "absent: {}, see {}".format(*chosen.needs))
    paths = [ROOT / "exporter", ROOT / "adapters", os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [python, "-m", "benchmarks.summary.topics", name, *(["--quick"] if quick else [])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        # Engines print a lot, which only helps after a failure.
        sys.stderr.buffer.write(done.stderr)
        return missing(chosen, f"{FAILED}, its error stands above")
    figures = {row: Figure(**figure) for row, figure in json.loads(done.stdout).items()}
    return {row.name: figures.get(row.name, Figure(why="not measured")) for row in chosen.rows}


def missing(chosen: Topic, why: str) -> Mapping[str, Figure]:
    """Return all rows without figures."""
    return {row.name: Figure(why=why) for row in chosen.rows}


def interpreter(chosen: Topic) -> str | None:
    """Return an interpreter that can measure the topic, or None."""
    if not chosen.venv:
        return sys.executable
    own = ROOT / "build" / chosen.venv / "bin" / "python"
    if own.exists():
        return str(own)
    module, _ = chosen.needs
    return sys.executable if importlib.util.find_spec(module) else None


def main() -> None:
    """Measure a topic, and write its figures as JSON."""
    answers = own_output()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topic", choices=TOPICS)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    found = topic(args.topic).measure(args.quick)
    json.dump({name: dataclasses.asdict(figure) for name, figure in found.items()}, answers)
    answers.close()


if __name__ == "__main__":
    main()
