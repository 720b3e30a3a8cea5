"""The command that writes ``grafana/``, or compares it with ``--check``: ``python -m tools.boards``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tools.boards import (
    fleet,
    health,
    kv_cache,
    latency,
    service,
    sglang,
    slow_requests,
    tenants,
    triton,
    vllm,
    why,
)

GRAFANA = Path(__file__).parents[2] / "grafana"
BOARDS = (
    fleet.BOARD,
    why.BOARD,
    vllm.BOARD,
    sglang.BOARD,
    latency.BOARD,
    service.BOARD,
    kv_cache.BOARD,
    tenants.BOARD,
    triton.BOARD,
    health.BOARD,
)
LOKI = (slow_requests.BOARD,)
"""Dashboards with a data source of their own, in ``grafana/loki/``."""


def files() -> dict[str, str]:
    """Return the content of each file by name."""
    found = {f"{board.file}.json": board for board in BOARDS}
    found |= {f"loki/{board.file}.json": board for board in LOKI}
    return {name: json.dumps(board.made(), indent=1) + "\n" for name, board in found.items()}


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a file is out of date")
    check = parser.parse_args().check
    made = files()
    there = {path.relative_to(GRAFANA).as_posix() for path in GRAFANA.rglob("*.json")}
    stale = sorted(there - made.keys())
    for name, text in made.items():
        path = GRAFANA / name
        if check and (name not in there or path.read_text() != text):
            stale.append(name)
        elif not check:
            path.write_text(text)
    if stale:
        listed = ", ".join(f"grafana/{name}" for name in stale)
        sys.stderr.write(f"out of date or of no board, run `make docs`: {listed}\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
