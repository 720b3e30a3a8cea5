"""Run faults against the product, and print which counts are lost, doubled or decreased.

Every fault has an exporter of its own, an engine that pushes items through the real
publisher at a fixed rate, and a scraper that reads the page 30 times a second. The
expected value of every series is known exactly. The exit code is 1 if a guarantee of
docs/reliability.md was broken.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from chaos import table
from chaos.exporter import knows
from chaos.faults import FAULTS, Skip
from chaos.run import run
from chaos.stage import Options
from chaos.verdict import Result

TRANSPORTS = ("ipc", "tcp", "curve")


def main() -> None:
    """Run the chosen faults one after the other, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--fault", nargs="+", choices=sorted(FAULTS), default=list(FAULTS))
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--rate", type=float, default=2000.0, help="items a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="of faults that come repeatedly")
    parser.add_argument("--quick", action="store_true", help="short times: a look, not a figure")
    parser.add_argument(
        "--work", type=float, default=0.0, help="microseconds of Python an item on the step thread"
    )
    parser.add_argument(
        "--without-state", action="store_true", help="no --state.dir, where there is one"
    )
    parser.add_argument("--out", type=Path, help="also to this file: .json, or Markdown")
    args = parser.parse_args()
    state = knows("state.dir") and not args.without_state
    results: list[Result] = []
    skipped: list[str] = []
    failed: list[str] = []
    for transport in args.transport:
        if transport == "curve" and not knows("ingest.curve-key"):
            skipped.append("curve: this release has none")
            continue
        options = Options(
            transport, args.rate, args.seed, args.rounds, args.quick, state, args.work
        )
        for name in args.fault:
            try:
                result = run(name, options)
            except Skip as reason:
                skipped.append(f"{name}, {transport}: {reason}")
                continue
            except RuntimeError as error:
                failed.append(f"{name}, {transport}: FAILED: {error}")
                continue
            results.append(result)
            print(f"{name} over {transport}: {' '.join(table.row(result)[2:])}", file=sys.stderr)
    if not results:
        raise SystemExit("nothing was run: " + "; ".join([*skipped, *failed]))
    shown = table.text(results, skipped, options) + "".join(f"- {line}\n" for line in failed)
    print(shown)
    if args.out:
        table.write(args.out, results, shown)
    raise SystemExit(bool(failed) or any(result.broken for result in results))


if __name__ == "__main__":
    main()
