"""The curve as shapes, and these as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from sidestep.errors import ConfigError
from sidestep.protocol.limits import printable
from sidestep.tracking.kv_blocks.hit_curve import Point
from sidestep.transport.path_owners import open_file

WIDTH, HEIGHT, MARGIN = 720, 420, 60
LETTERS = 12
"""Height of letters."""
CURVE, BAND, GRID = "#1f77b4", "#d2e4f0", "#dddddd"


class Line(NamedTuple):
    """A line through points; with a width of 0, the area that it encloses."""

    points: Sequence[tuple[float, float]]
    colour: str
    width: int


class Label(NamedTuple):
    """Text with its middle, or its end, at a place on its base line."""

    text: str
    left: float
    base: float
    centred: bool = True


Shapes = Sequence[Line | Label]


def writer(path: Path) -> Callable[[Sequence[Point], str], None]:
    """Return what writes points, in ascending order, under a title to a file of this name.

    Raises:
        ConfigError: The name is not that of an SVG.
    """
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"--plot {path}: the name must end with .svg")

    def write(points: Sequence[Point], title: str) -> None:
        drawn = svg([*shapes(points, printable(title))])
        try:
            with open(path, "wb", opener=open_file) as file:
                file.write(drawn)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    return write


def shapes(points: Sequence[Point], title: str) -> Iterator[Line | Label]:
    """Yield the shapes: hit ratio over capacity, which doubles at equal steps, with the bounds of its sampling error."""
    first, last = (math.log2(points[at].blocks) for at in (0, -1))
    scale = (WIDTH - 2 * MARGIN) / (last - first or 1.0)
    lefts = [MARGIN + (math.log2(point.blocks) - first) * scale for point in points]

    def top(ratio: float) -> float:
        return HEIGHT - MARGIN - ratio * (HEIGHT - 2 * MARGIN)

    lows = [(left, top(point.low)) for left, point in zip(lefts, points, strict=True)]
    highs = [(left, top(point.high)) for left, point in zip(lefts, points, strict=True)]
    yield Line([*lows, *reversed(highs)], BAND, 0)
    for percent in range(0, 101, 20):
        height = top(percent / 100)
        yield Line([(MARGIN, height), (WIDTH - MARGIN, height)], GRID, 1)
        yield Label(f"{percent} %", MARGIN - 8, height + 4, centred=False)
    labelled = -math.inf
    for left, point in zip(lefts, points, strict=True):
        if left - labelled > 4 * LETTERS:
            yield Label(_short(point.blocks), left, HEIGHT - MARGIN + 18)
            labelled = left
    ratios = [top(point.hit_ratio) for point in points]
    yield Line([*zip(lefts, ratios, strict=True)], CURVE, 2)
    yield Label(title, WIDTH / 2, 30)
    yield Label("capacity in blocks", WIDTH / 2, HEIGHT - 14)


def svg(drawn: Shapes) -> bytes:
    """Return shapes as SVG."""
    font = f'font-family="sans-serif" font-size="{LETTERS}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {font}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for shape in drawn:
        if isinstance(shape, Label):
            anchor = "middle" if shape.centred else "end"
            place = f'x="{shape.left:.1f}" y="{shape.base:.1f}" text-anchor="{anchor}"'
            parts.append(f"<text {place}>{escape(shape.text)}</text>")
            continue
        places = " ".join(f"{left:.1f},{top:.1f}" for left, top in shape.points)
        parts.append(
            f'<polyline points="{places}" fill="none" stroke="{shape.colour}"'
            f' stroke-width="{shape.width}"/>'
            if shape.width
            else f'<polygon points="{places}" fill="{shape.colour}"/>'
        )
    return "\n".join([*parts, "</svg>", ""]).encode()


def _short(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
