"""The table as a part of a document: ratios, and against whom; no times, which do not travel."""

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
    """Put ``table`` where ``path`` has the last one."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{path} has no place for the table, between {BEGIN}and {END}")
    path.write_text(before + BEGIN + "".join(markdown(table)) + END + after, encoding="utf-8")


def markdown(table: Table) -> Iterator[str]:
    """The lines: a table a topic."""
    yield f"\nMeasured {today()}.\n"
    for name, figures in table.items():
        yield f"\n**{topic(name).title}**\n\n| Row | Peer | Ratio | Target | Met |\n|---|---|---|---|---|\n"
        for row in topic(name).rows:
            what, unit, ours, _, peer, ratio, target, met = cells(row, figures[row.name])
            # A figure that has a limit of its own says itself how far it is off; a share is no time.
            shown = row.limit is not None or unit.startswith("%")
            own = f" ({ours} {unit})" if shown and ours else ""
            yield f"| {what} | {peer} | {ratio}{own} | {target} | {met} |\n"
    yield "\n"
