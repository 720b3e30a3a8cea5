"""Rows of the table: a quantity, its peer and its target.

Rows are declared before they are measured, so that a row whose peer is absent or whose measurement failed
is still in the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

LEFT_OUT = "left out by --quick"
HEAD = ("row", "unit", "sidestep", "peer's", "peer", "ratio", "target", "met")


@dataclasses.dataclass(frozen=True)
class Row:
    """A quantity to measure.

    Attributes:
        peer: Peer of the comparison; empty if there is none.
        target: Least ratio to the peer, on any machine.
        limit: Upper limit of sidestep's own figure.
        more: More is better; otherwise the row is a cost.
        is_absolute: sidestep's own figure is worth reading, although it depends on the machine.
    """

    name: str
    unit: str
    peer: str = ""
    target: float | None = None
    limit: float | None = None
    more: bool = False
    is_absolute: bool = False


@dataclasses.dataclass(frozen=True)
class Figure:
    """The measurement of a row.

    Attributes:
        why: Why a figure is missing.
    """

    ours: float | None = None
    theirs: float | None = None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Topic:
    """Rows that are measured together in a process of their own.

    Attributes:
        measure: Returns figures by row name; its argument is True for a quick run.
        venv: Environment in ``build/`` that has the peer; empty for the current one.
        needs: A required module, and the script that installs it.
    """

    title: str
    rows: Sequence[Row]
    measure: Callable[[bool], Mapping[str, Figure]]
    venv: str = ""
    needs: tuple[str, str] = ("", "")


def ratio(row: Row, figure: Figure) -> float | None:
    """Return how many times better sidestep is."""
    better, worse = figure.ours, figure.theirs
    if not row.more:
        better, worse = worse, better
    return better / worse if better is not None and worse else None


def met(row: Row, figure: Figure) -> bool | None:
    """Return whether target and limit are met, or None if there is nothing to compare."""
    found = ratio(row, figure)
    said = [found >= row.target] if found is not None and row.target is not None else []
    if figure.ours is not None and row.limit is not None:
        said.append(figure.ours <= row.limit)
    return all(said) if said else None


def cells(row: Row, figure: Figure) -> list[str]:
    """Return the row as texts under ``HEAD``."""
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
    """Return the text of target and limit."""
    said = [f"{row.target:g}x"] if row.target is not None else []
    if row.limit is not None:
        said.append(f"<= {row.limit:g}")
    return ", ".join(said)


def times(value: float | None) -> str:
    """Return the text of a ratio, with three digits."""
    if value is None:
        return ""
    return (
        f"{value:.0f}x" if value >= 99.5 else f"{value:.1f}x" if value >= 9.95 else f"{value:.2f}x"
    )


def number(value: float | None) -> str:
    """Return the text of a figure, with three digits or all before the point."""
    if value is None:
        return ""
    size = abs(value)
    return f"{value:,.{0 if size >= 99.95 or not size else 1 if size >= 9.995 else 2}f}"
