"""Fuzz all targets, one after the other, and print one table: ``python -m fuzz``.

The corpus grows in ``build/fuzz``, where findings are stored, too. Copy a finding that is understood to
``tests/hostile/corpus``: an ordinary test replays it.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from fuzz.targets import BY_NAME, TARGETS, Target

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "tests" / "hostile" / "corpus"
COLUMNS = ("target", "executions", "edges", "features", "new inputs", "findings", "peak MiB")
LAST = re.compile(r"#(\d+)\s+(?:DONE|pulse|NEW|REDUCE|RELOAD|INITED).*?cov: (\d+) ft: (\d+)")


def main() -> None:
    """Parse, run, print; the exit code is 1 if anything was found, and 2 without the fuzzer."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*BY_NAME, []], help="default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each of them")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "fuzz")
    options = parser.parse_args()
    if not importlib.util.find_spec("atheris"):
        parser.exit(2, "fuzz: atheris is missing: pip install -e '.[fuzz]' with Python < 3.14\n")
    chosen = [target for target in TARGETS if target.name in (options.targets or BY_NAME)]
    rows = [fuzz(target, options.seconds, options.work) for target in chosen]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for row in (COLUMNS, *rows):
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))
    sys.exit(any(row[5] != "0" for row in rows))


def fuzz(target: Target, seconds: int, work: Path) -> tuple[str, ...]:
    """Fuzz one target, and return its row of the table."""
    corpus, found = work / target.name, work / "findings" / target.name
    for directory in (corpus, found):
        directory.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number:03}").write_bytes(seed)
    before = len(list(corpus.iterdir()))
    known = set(found.iterdir())
    command = [
        sys.executable, "-m", "fuzz.one", target.name, str(corpus),
        *(str(path) for path in [KEPT / target.name] if path.is_dir()),
        f"-max_total_time={seconds}", "-max_len=65536", "-timeout=20", "-rss_limit_mb=1024",
        "-print_final_stats=1", f"-artifact_prefix={found}/",
    ]  # fmt: skip
    log = work / f"{target.name}.log"
    with log.open("w") as output:
        # An exception is a finding: libFuzzer says so and keeps the input.
        subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False)
    text = log.read_text(errors="replace")
    seen = LAST.findall(text) or [("0", "0", "0")]
    executions = re.search(r"number_of_executed_units:\s+(\d+)", text)
    peak = re.search(r"peak_rss_mb:\s+(\d+)", text)
    grown = len(list(corpus.iterdir())) - before
    new = set(found.iterdir()) - known
    for path in sorted(new):
        print(f"{target.name}: {path}, see {log}")
    crashed = len(new) or int(executions is None)
    count = executions[1] if executions else seen[-1][0]
    return target.name, count, *seen[-1][1:], str(grown), str(crashed), peak[1] if peak else "-"


if __name__ == "__main__":
    main()
