"""Open thousands of silent connections to an exporter: ``python -m fuzz.flood --connections 10000``.

The exporter has an honest engine that pushes 600 tokens a second. Half of the connections go to the
engines' port and half to that of the pages. They are opened as fast as possible, held, and closed.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import socket
import sys
import time
from collections.abc import Iterator

from fuzz.siege import Siege, besieged

HELD = 10.0
COLUMNS = (
    "connections",
    "seconds",
    "refused",
    "peak MiB",
    "MiB after",
    "peak fds",
    "fds after",
    "lag ms",
    "lost",
)


def main() -> None:
    """Run the flood and print a table; the exit code is 1 if the exporter died or a count is missing."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.flood", description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--held", type=float, default=HELD, help="seconds that they stay")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with besieged() as siege:
        siege.settled()
        row = flood(siege, options.connections, options.held)
        sys.exit(show(row) if siege.process.running else "the exporter is gone")


def flood(siege: Siege, connections: int, held: float) -> tuple[object, ...]:
    """Open, hold and close the connections; return the row of the table."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        opened = sum(opening(siege, stack, connections))
        took = time.monotonic() - began
        while time.monotonic() < began + took + held:
            time.sleep(0.1)
    siege.settled()
    siege.waits_for(lambda: siege.open_files() < 200)
    after = siege.status("VmRSS"), siege.open_files()
    siege.end()
    siege.waits_for(lambda: siege.counted() == siege.honest.pushed)
    lost = siege.honest.pushed - siege.counted()
    peak = siege.status("VmHWM")
    lag = round(siege.lag * 1e3)
    refused = connections - opened
    return (
        connections,
        round(took, 1),
        refused,
        peak,
        after[0],
        siege.descriptors,
        after[1],
        lag,
        lost,
    )


def opening(siege: Siege, stack: contextlib.ExitStack, connections: int) -> Iterator[bool]:
    """Yield whether each connection could be opened."""
    for number in range(connections):
        port = siege.port if number % 2 else siege.web_port
        # Each address of the loopback network has ports of its own.
        source = (f"127.0.0.{2 + number // 20_000}", 0)
        try:
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 5, source))
        except OSError:
            yield False
        else:
            yield True


def show(row: tuple[object, ...]) -> int:
    """Print the table."""
    widths = [max(len(name), len(str(cell))) for name, cell in zip(COLUMNS, row, strict=True)]
    for cells in (COLUMNS, row):
        print("  ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    return int(row[-1] != 0)


if __name__ == "__main__":
    main()
