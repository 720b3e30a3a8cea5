"""An aligned text table, and the machine that its figures belong to."""

from __future__ import annotations

import datetime as dt
import os
import platform
from collections.abc import Collection, Sequence
from pathlib import Path


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` (0 to 1) of ``values`` lie."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def show(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = ()
) -> None:
    """Print ``rows`` under ``head``; the first column and ``left`` are aligned left, numbers right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lefts = [not index or name in left for index, name in enumerate(head)]
    print(f"{title}\n{machine()}\n")
    for row in (head, ["-" * width for width in widths], *rows):
        texts = (
            text.ljust(width) if at_left else text.rjust(width)
            for text, width, at_left in zip(row, widths, lefts, strict=True)
        )
        print("  ".join(texts).rstrip())


def today() -> str:
    """Return today's date and the machine."""
    return f"{dt.datetime.now(dt.timezone.utc).date()}, {machine()}"


def machine() -> str:
    """Return a description of the machine: absolute figures depend on it, ratios hardly do."""
    return f"Python {platform.python_version()}, {processor()}, {os.cpu_count()} cores"


def processor() -> str:
    """Return the processor's model where Linux shows it, else its architecture."""
    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        said = ""
    models = (line.partition(":")[2].strip() for line in said.splitlines() if "model name" in line)
    return next(models, "") or platform.machine()
