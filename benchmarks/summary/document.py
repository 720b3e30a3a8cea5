"""The table in a document: ratios and peers, without times, which depend on the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.summary.rows import Figure, cells
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
    """Return the table of a topic."""
    lines = [
        f"**{topic(name).title}**",
        "",
        measured,
        "",
        "| Row | Peer | Ratio | Target |",
        "|---|---|---|---|",
    ]
    for row in topic(name).rows:
        found = figures.get(row.name, Figure())
        what, unit, ours, _, peer, ratio, target, met = cells(row, found)
        missed = " (missed)" if met == "NO" else ""
        # Figures with a limit, and shares, are comparable between machines.
        shown = row.is_absolute or row.limit is not None or unit.startswith("%")
        own = f" ({ours} {unit})" if shown and ours else ""
        lines.append(f"| {what} | {peer} | {ratio}{own} | {target}{missed} |")
    return "\n".join(lines)
