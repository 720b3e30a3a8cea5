"""A row of the one table: what is measured, against whom, and what it is to reach.

Rows are declared; a measurement only brings the figures. So a row whose peer is absent, or
whose measurement failed, still stands in the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

LEFT_OUT = "left out by --quick"
HEAD = ("row", "unit", "sidestep", "peer's", "peer", "ratio", "target", "met")


@dataclasses.dataclass(frozen=True)
class Row:
    """One question.

    Attributes:
        peer: Whom sidestep is compared with; empty if nobody.
        target: What a quick machine and a slow one alike should show: how many times better.
        limit: What sidestep's own figure may come to at most.
        more: Whether more is better; else it is a cost.
    """

    name: str
    unit: str
    peer: str = ""
    target: float | None = None
    limit: float | None = None
    more: bool = False


@dataclasses.dataclass(frozen=True)
class Figure:
    """What was measured for a row.

    Attributes:
        why: Why a figure is missing.
    """

    ours: float | None = None
    theirs: float | None = None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Topic:
    """Rows that are measured together, in a process of their own.

    Attributes:
        measure: Figures by a row's name; what it is given says whether to be quick.
        venv: Under ``build/``, whose interpreter has what the peer needs; empty for our own.
        needs: A module without which nothing can be measured, and who installs it.
    """

    title: str
    rows: Sequence[Row]
    measure: Callable[[bool], Mapping[str, Figure]]
    venv: str = ""
    needs: tuple[str, str] = ("", "")


def ratio(row: Row, figure: Figure) -> float | None:
    """How many times better sidestep is."""
    better, worse = figure.ours, figure.theirs
    if not row.more:
        better, worse = worse, better
    return better / worse if better is not None and worse else None


def met(row: Row, figure: Figure) -> bool | None:
    """Whether what the row is to reach is reached; None where there is nothing to say."""
    found = ratio(row, figure)
    said = [found >= row.target] if found is not None and row.target is not None else []
    if figure.ours is not None and row.limit is not None:
        said.append(figure.ours <= row.limit)
    return all(said) if said else None


def cells(row: Row, figure: Figure) -> list[str]:
    """The row as texts, under ``HEAD``."""
    found = ratio(row, figure)
    peer = row.peer
    if figure.why:
        peer = f"{peer} ({figure.why})" if peer else figure.why
    return [
        row.name,
        row.unit,
        number(figure.ours),
        number(figure.theirs),
        peer,
        times(found),
        goal(row),
        {None: "", True: "yes", False: "NO"}[met(row, figure)],
    ]


def goal(row: Row) -> str:
    """What is to be reached."""
    said = [f"{row.target:g}x"] if row.target is not None else []
    if row.limit is not None:
        said.append(f"<= {row.limit:g}")
    return ", ".join(said)


def times(value: float | None) -> str:
    """A ratio, as exact as it deserves."""
    if value is None:
        return ""
    return (
        f"{value:.0f}x" if value >= 99.5 else f"{value:.1f}x" if value >= 9.95 else f"{value:.2f}x"
    )


def number(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return ""
    size = abs(value)
    return f"{value:,.{0 if size >= 99.95 or not size else 1 if size >= 9.995 else 2}f}"
