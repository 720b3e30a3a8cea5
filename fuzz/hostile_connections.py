"""Make hostile connections of every kind to an exporter and to an engine, and print one table.

``python -m fuzz.hostile_connections --connections 1000``: each row is one kind over one transport.
The exit code is 1 if a process ended, an honest engine lost a count, or memory grew too much.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fuzz.attacks import ATTACKS, attack
from fuzz.hostile_exporter import BEHAVIOURS, hostile_exporter
from fuzz.siege import Siege, besieged
from fuzz.zmtp_peer import Address

MAX_EXPORTER_MIB, MAX_ENGINE_GROWTH_MIB = 512, 24.0
DOORS = ("ipc", "tcp")
ROOT = Path(__file__).parents[1]


class Row(NamedTuple):
    """One kind of hostile connection, and the state of the attacked process afterwards."""

    victim: str
    door: str
    kind: str
    connections: int
    mib: float
    outcome: str


def main() -> None:
    """Parse, attack, print."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.hostile_connections", description=__doc__)
    parser.add_argument(
        "kinds", nargs="*", choices=[*ATTACKS, *BEHAVIOURS, []], help="default: all"
    )
    parser.add_argument("--connections", type=int, default=1000, help="of each kind")
    options = parser.parse_args()
    rows = []
    print(("{:>10}" * 2 + "{:>32}" + "{:>14}" * 3).format(*Row._fields), flush=True)
    both = itertools.chain(
        to_exporter(options.kinds, options.connections),
        to_engine(options.kinds, options.connections),
    )
    for row in both:
        rows.append(row)
        print("{:>10}{:>10}{:>32}{:>14}{:>14.1f}{:>14}".format(*row), flush=True)
    sys.exit(any(row.outcome != "lives" for row in rows))


def to_exporter(kinds: list[str], connections: int) -> Iterator[Row]:
    """Attack an exporter that has an honest engine, too."""
    with besieged() as siege:
        for door in DOORS:
            address: Address = siege.path if door == "ipc" else ("127.0.0.1", siege.port)
            for name in ATTACKS:
                if not kinds or name in kinds:
                    made = attack(name, address, connections)
                    yield Row("exporter", door, name, made, _peak(siege), _outcome(siege))
                    if not siege.process.running:
                        siege.process.start()


def to_engine(kinds: list[str], connections: int) -> Iterator[Row]:
    """Let an engine's process, alternately busy and idle, connect to a hostile exporter."""
    with tempfile.TemporaryDirectory() as folder:
        for door in DOORS:
            for number, (name, behaviour) in enumerate(BEHAVIOURS.items()):
                if kinds and name not in kinds:
                    continue
                address: Address = Path(folder) / "x" if door == "ipc" else ("127.0.0.1", 0)
                with hostile_exporter(address, behaviour) as hostile:
                    done = subprocess.run(
                        [
                            sys.executable, "-m", "fuzz.engine_under_attack",
                            hostile.endpoint, str(connections), *(["--idle"] if number % 2 else []),
                        ],
                        cwd=ROOT, capture_output=True, text=True, check=False,
                    )  # fmt: skip
                    growth = float(done.stdout.split()[0]) if done.stdout else 0.0
                    outcome = "lives" if growth <= MAX_ENGINE_GROWTH_MIB else "grew"
                    if done.returncode:
                        outcome = f"exit {done.returncode}"
                    yield Row("engine", door, name, hostile.connections, growth, outcome)


def _peak(siege: Siege) -> float:
    return float(siege.status("VmHWM")) if siege.process.running else 0.0


def _outcome(siege: Siege) -> str:
    if not siege.process.running:
        return "ended"
    if not siege.settled() or siege.value("sidestep_lost_items_total"):
        return "lost"
    return "lives" if _peak(siege) <= MAX_EXPORTER_MIB else "grew"


if __name__ == "__main__":
    main()
