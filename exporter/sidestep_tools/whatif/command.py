"""The command ``sidestep whatif``: it reads a file, and shows the hit-ratio curve as a table or a picture."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import click
import msgspec

from sidestep.errors import ConfigError
from sidestep.protocol.limits import printable
from sidestep.tracking.kv_blocks.hit_ratio_curve import Point
from sidestep.transport.path_owners import open_file
from sidestep_tools.formatting import count
from sidestep_tools.whatif.estimate import RecordedCurve, TraceCurve, is_recording
from sidestep_tools.whatif.trace import Trace

STORED_ONLY = (
    "KV events have no lookups, only the blocks that were stored: the ratio is the share of these"
    " that a cache of that size would have kept"
)
WIDTH, HEIGHT, MARGIN = 720, 420, 60
LETTERS = 12
"""Height of letters."""
CURVE, BAND, GRID = "#1f77b4", "#d2e4f0", "#dddddd"


def run(
    path: Path,
    *,
    rate: float,
    capacities: Sequence[int],
    block_size: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Show the hit-ratio curve."""
    # Checked before the file is read, which may take long.
    if plot is not None and plot.suffix.lower() != ".svg":
        raise ConfigError(f"--plot {plot}: the name must end with .svg")
    curve, sizes, remark = _read(path, rate)
    if not curve.accesses:
        raise ConfigError(f"{path}: no lookups of blocks")
    points = curve.points(capacities or sizes)
    if plot is not None:
        write_plot(plot, sorted(points), path.name)
    if as_json:
        found = {
            "accesses": curve.accesses,
            "distinct": curve.distinct,
            "curve": [point._asdict() for point in points],
        }
        click.echo(msgspec.json.encode(found))
    else:
        if block_size is None and isinstance(curve, RecordedCurve):
            block_size = curve.block_size
        for line in _table(curve, points, block_size):
            click.echo(line)
    if remark:
        click.echo(remark, err=True)


def _read(path: Path, rate: float) -> tuple[TraceCurve | RecordedCurve, Sequence[int], str]:
    """Return the curve of a file, sizes to show, and a remark on its limits."""
    if is_recording(path):
        recorded = RecordedCurve(path)
        return recorded, recorded.sizes or _fractions(recorded.distinct), ""
    trace = Trace(path)
    curve = TraceCurve(rate, secrets.randbits(64))
    for blocks in trace:
        if blocks is None:
            curve.clear()
        else:
            curve.add(blocks)
    return curve, _fractions(curve.distinct), "" if trace.has_hits else STORED_ONLY


def _fractions(blocks: int) -> list[int]:
    return sorted({max(blocks >> shift, 1) for shift in range(7)})


def _table(
    curve: TraceCurve | RecordedCurve, points: Sequence[Point], block_size: int | None
) -> Iterator[str]:
    yield f"{curve.accesses:,} lookups of {curve.distinct:,} distinct blocks"
    tokens = f"{'tokens':>16}" if block_size else ""
    yield f"{'blocks':>12}{tokens}{'hit ratio':>11}{'sampling error':>20}"
    for point in points:
        tokens = f"{point.blocks * block_size:>16,}" if block_size else ""
        bounds = f"{point.low:.2%} to {point.high:.2%}"
        yield f"{point.blocks:>12,}{tokens}{point.hit_ratio:>11.2%}{bounds:>20}"


def write_plot(path: Path, points: Sequence[Point], title: str) -> None:
    """Write points, in ascending order, to a file."""
    drawn = "\n".join([*_drawn(points, printable(title)), ""]).encode()
    try:
        with open(path, "wb", opener=open_file) as file:
            file.write(drawn)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _drawn(points: Sequence[Point], title: str) -> Iterator[str]:
    """Yield the lines of the picture: hit ratio over capacity, which doubles at equal steps.

    A band shows the bounds of the sampling error.
    """
    first, last = (math.log2(points[at].blocks) for at in (0, -1))
    scale = (WIDTH - 2 * MARGIN) / (last - first or 1.0)
    lefts = [MARGIN + (math.log2(point.blocks) - first) * scale for point in points]

    def top(ratio: float) -> float:
        return HEIGHT - MARGIN - ratio * (HEIGHT - 2 * MARGIN)

    def through(ratios: Sequence[float]) -> list[str]:
        places = zip(lefts, ratios, strict=True)
        return [f"{left:.1f},{top(ratio):.1f}" for left, ratio in places]

    font = f'font-family="sans-serif" font-size="{LETTERS}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {font}>'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    lows = through([point.low for point in points])
    highs = through([point.high for point in points])
    yield f'<polygon points="{" ".join([*lows, *reversed(highs)])}" fill="{BAND}"/>'
    for percent in range(0, 101, 20):
        height = top(percent / 100)
        yield f'<path d="M{MARGIN} {height:.1f}H{WIDTH - MARGIN}" stroke="{GRID}"/>'
        yield _text(f"{percent} %", MARGIN - 8, height + 4, anchor="end")
    labelled = -math.inf
    for left, point in zip(lefts, points, strict=True):
        if left - labelled > 4 * LETTERS:
            yield _text(count(point.blocks), left, HEIGHT - MARGIN + 18)
            labelled = left
    ratios = " ".join(through([point.hit_ratio for point in points]))
    yield f'<polyline points="{ratios}" fill="none" stroke="{CURVE}" stroke-width="2"/>'
    yield _text(title, WIDTH / 2, 30)
    yield _text("capacity in blocks", WIDTH / 2, HEIGHT - 14)
    yield "</svg>"


def _text(text: str, left: float, base: float, anchor: str = "middle") -> str:
    """Return text with its middle, or its end, at a place on its base line."""
    return f'<text x="{left:.1f}" y="{base:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
