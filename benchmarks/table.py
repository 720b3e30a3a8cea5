"""One aligned text table, and the medians that go into it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of ``values`` lie."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows`` under ``head``: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    print(f"{title}\n{machine()}\n")
    for row in (head, ["-" * width for width in widths], *rows):
        first, *rest = (
            text.rjust(width) if index else text.ljust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]).rstrip())


def machine() -> str:
    """What the figures belong to: absolute ones do not travel, ratios nearly do."""
    return f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
