"""Sparklines: the last values of a number as blocks of one or more lines."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

BLOCKS = " ▁▂▃▄▅▆▇█"
EIGHTHS = len(BLOCKS) - 1


def sparkline(values: Sequence[float | None], width: int, height: int = 1) -> list[str]:
    """Return the last ``width`` values as ``height`` lines, the newest at the right.

    The highest fills all lines, and a zero is the lowest block. None, and the time before the
    first value, are blanks.
    """
    newest = list(values)[-width:] if width > 0 else []
    shown = [value if value is not None and isfinite(value) else None for value in newest]
    top = max((value for value in shown if value is not None), default=0.0)
    columns = []
    for value in shown:
        if value is None:
            columns.append(BLOCKS[0] * height)
            continue
        eighths = max(1, round(value / top * EIGHTHS * height)) if top > 0 else 1
        full, rest = divmod(min(eighths, EIGHTHS * height), EIGHTHS)
        column = BLOCKS[-1] * full + (BLOCKS[rest] if rest else "")
        columns.append(column.ljust(height))
    lines = ["".join(column[line] for column in columns) for line in range(height)]
    return [line.rjust(width) for line in reversed(lines)]
