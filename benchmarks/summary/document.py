"""The table in a document: ratios and peers, without times, which depend on the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.summary.rows import Figure, Row, cells, goal
from benchmarks.summary.topics import TOPICS, topic
from benchmarks.table import today

BEGIN = "<!-- Written by `python -m benchmarks --write`: -->\n"
END = "<!-- until here. -->\n"
UNMEASURED = "Not measured yet."

Table = Mapping[str, Mapping[str, Figure]]
"""Figures by topic and by row."""


def write(path: Path, table: Table) -> None:
    """Replace the sections of the measured topics in ``path``; a topic never measured has no figures."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{path} has no place for the table, between {BEGIN}and {END}")
    sections = {
        one.partition("**")[0]: f"**{one.strip()}"
        for one in re.split(r"^\*\*", old, flags=re.MULTILINE)
    }
    made = []
    for name in TOPICS:
        title = topic(name).title
        if name in table:
            made.append(section(name, table[name], f"Measured {today()}."))
        else:
            old_section = sections.get(title, UNMEASURED)
            is_old = UNMEASURED not in old_section
            made.append(old_section if is_old else section(name, {}, UNMEASURED))
    written = "\n\n".join(made)
    path.write_text(f"{before}{BEGIN}\n{written}\n\n{END}{after}", encoding="utf-8")


def section(name: str, figures: Mapping[str, Figure], measured: str) -> str:
    """Return the title, the date and the table of a topic."""
    rows = topic(name).rows
    texts = {row.name: result(row, figures.get(row.name, Figure())) for row in rows}
    return "\n".join([f"**{topic(name).title}**", "", measured, "", *table(rows, texts)])


def result(row: Row, figure: Figure) -> str:
    """Return the ratio and sidestep's own figure, as far as it is comparable between machines or worth reading."""
    _, unit, ours, _, _, ratio, _, met = cells(row, figure)
    shown = row.is_absolute or row.limit is not None or unit.startswith("%")
    own = ours if has_cases([row]) or not ours else f"{ours} {unit}"
    own = own if shown else ""
    text = f"{ratio} ({own})" if ratio and own else ratio or own
    return figure.why or (f"{text} (missed)" if met == "NO" else text)


def has_cases(rows: Sequence[Row]) -> bool:
    """Return whether the rows' names are such as ``CASE: QUANTITY``."""
    return all(": " in row.name for row in rows)


def table(rows: Sequence[Row], texts: Mapping[str, str]) -> list[str]:
    """Return the lines of a table of rows; where rows have cases, these are its columns.

    A peer that all rows share is named above the table.
    """
    peers = {row.peer for row in rows if row.peer}
    above = [f"Compared with {peers.pop()}.", ""] if len(peers) == 1 else []
    if has_cases(rows):
        lines = {"": list(dict.fromkeys(row.name.split(": ")[0] for row in rows))}
        for row in rows:
            goals = f" ({goal(row)})" if goal(row) else ""
            quantity = f"{row.name.split(': ')[1]}, {row.unit}{goals}"
            lines.setdefault(quantity, []).append(texts[row.name])
        found = [[first, *others] for first, others in lines.items()]
    else:
        found = [["", "Peer", "Ratio", "Target"]]
        found += [[row.name, row.peer, texts[row.name], goal(row)] for row in rows]
        empty = {0: False, 1: not peers, 2: False, 3: not any(goal(row) for row in rows)}
        found = [[one for n, one in enumerate(cells) if not empty[n]] for cells in found]
    head, *others = [f"| {' | '.join(each)} |" for each in found]
    return [*above, head, "|---" * len(found[0]) + "|", *others]
