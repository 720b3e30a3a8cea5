"""The table in a document: ratios and peers, without times, which depend on the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.summary.rows import Figure, cells
from benchmarks.summary.topics import topic
from benchmarks.table import today

BEGIN = "<!-- Written by `python -m benchmarks --write`: -->\n"
END = "<!-- until here. -->\n"

Table = Mapping[str, Mapping[str, Figure]]
"""Figures by topic and by row."""


def write(path: Path, table: Table) -> None:
    """Replace the table in ``path``."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{path} has no place for the table, between {BEGIN}and {END}")
    path.write_text(before + BEGIN + "".join(markdown(table)) + END + after, encoding="utf-8")


def markdown(table: Table) -> Iterator[str]:
    """Yield the lines of a table for each topic."""
    yield f"\nMeasured {today()}.\n"
    for name, figures in table.items():
        yield f"\n**{topic(name).title}**\n\n| Row | Peer | Ratio | Target |\n|---|---|---|---|\n"
        for row in topic(name).rows:
            what, unit, ours, _, peer, ratio, target, met = cells(row, figures[row.name])
            missed = " (missed)" if met == "NO" else ""
            # Figures with a limit, and shares, are comparable between machines.
            shown = row.limit is not None or unit.startswith("%")
            own = f" ({ours} {unit})" if shown and ours else ""
            yield f"| {what} | {peer} | {ratio}{own} | {target}{missed} |\n"
    yield "\n"
