"""The hit-ratio curve as a picture in SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from sidestep.errors import ConfigError
from sidestep.protocol.limits import printable
from sidestep.tracking.kv_blocks.hit_ratio_curve import Point
from sidestep.transport.path_owners import open_file

WIDTH, HEIGHT, MARGIN = 720, 420, 60
LETTERS = 12
"""Height of letters."""
CURVE, BAND, GRID = "#1f77b4", "#d2e4f0", "#dddddd"


def writer(path: Path) -> Callable[[Sequence[Point], str], None]:
    """Return a function that draws points, in ascending order, under a title into a file of this name.

    Raises:
        ConfigError: The name is not that of an SVG.
    """
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"--plot {path}: the name must end with .svg")

    def write(points: Sequence[Point], title: str) -> None:
        drawn = "\n".join(_svg(points, printable(title)))
        try:
            with open(path, "wb", opener=open_file) as file:
                file.write(drawn.encode())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    return write


def _svg(points: Sequence[Point], title: str) -> Iterator[str]:
    """Yield the elements: hit ratio over capacity, on a logarithmic axis, with its sampling error."""
    first, last = (math.log2(points[at].blocks) for at in (0, -1))
    scale = (WIDTH - 2 * MARGIN) / (last - first or 1.0)
    lefts = [MARGIN + (math.log2(point.blocks) - first) * scale for point in points]

    def top(ratio: float) -> float:
        return HEIGHT - MARGIN - ratio * (HEIGHT - 2 * MARGIN)

    def places(ratios: Sequence[float]) -> list[str]:
        return [f"{x:.1f},{top(ratio):.1f}" for x, ratio in zip(lefts, ratios, strict=True)]

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' font-family="sans-serif" font-size="{LETTERS}">'
    )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    band = places([p.low for p in points]) + places([p.high for p in points])[::-1]
    yield f'<polygon points="{" ".join(band)}" fill="{BAND}"/>'
    for percent in range(0, 101, 20):
        y = top(percent / 100)
        yield f'<path d="M{MARGIN} {y:.1f}H{WIDTH - MARGIN}" stroke="{GRID}"/>'
        yield _text(f"{percent} %", MARGIN - 8, y + 4, anchor="end")
    labelled = -math.inf
    for left, point in zip(lefts, points, strict=True):
        if left - labelled > 4 * LETTERS:
            yield _text(_short(point.blocks), left, HEIGHT - MARGIN + 18)
            labelled = left
    curve = " ".join(places([p.hit_ratio for p in points]))
    yield f'<polyline points="{curve}" fill="none" stroke="{CURVE}" stroke-width="2"/>'
    yield _text(title, WIDTH / 2, 30)
    yield _text("capacity in blocks", WIDTH / 2, HEIGHT - 14)
    yield "</svg>\n"


def _text(text: str, x: float, y: float, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
