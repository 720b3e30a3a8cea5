"""The ``make bench`` command: one table of sidestep's costs and those of its peers, measured in one run.

Each topic runs in a process of its own, one after the other. An absent peer is named. The command fails
if a measurement could not be made, not if a result is slow.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.summary.document import write
from benchmarks.summary.rows import HEAD, LEFT_OUT, cells
from benchmarks.summary.topics import FAILED, ROOT, TOPICS, measured, missing, topic
from benchmarks.table import show

DOCUMENT = ROOT / "docs" / "performance.md"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="four minutes: rough figures, and real engines only where --only names them",
    )
    parser.add_argument(
        "--only", nargs="+", choices=TOPICS, metavar="TOPIC", help=", ".join(TOPICS)
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"put the ratios of the measured topics into {DOCUMENT.relative_to(ROOT)}",
    )
    args = parser.parse_args()
    table = {}
    for name in args.only or TOPICS:
        started = time.monotonic()
        if args.quick and topic(name).venv and not args.only:
            table[name] = missing(topic(name), LEFT_OUT)
        else:
            table[name] = measured(name, quick=args.quick)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    rows = []
    for name, figures in table.items():
        rows += [[topic(name).title, *[""] * (len(HEAD) - 1)]]
        rows += [cells(row, figures[row.name]) for row in topic(name).rows]
        rows += [[""] * len(HEAD)]
    show("sidestep and its peers, measured in one run", HEAD, rows[:-1], left=("row", "peer"))
    if args.write:
        write(DOCUMENT, table)
    if any(each.why.startswith(FAILED) for found in table.values() for each in found.values()):
        raise SystemExit("some rows could not be measured: the table says which")


if __name__ == "__main__":
    main()
