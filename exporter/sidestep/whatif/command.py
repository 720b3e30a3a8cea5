"""The command ``sidestep whatif``: reads a file, and shows the curve."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from sidestep.errors import ConfigError
from sidestep.tracking.kv_blocks.hit_curve import Point
from sidestep.whatif.estimate import TraceCurve
from sidestep.whatif.plot import writer
from sidestep.whatif.trace import Trace


def run(
    path: Path,
    *,
    rate: float,
    capacities: Sequence[int],
    block_size: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Show the hit ratio over the capacity.

    Raises:
        ConfigError: The file cannot be read or has no lookups, or the picture cannot be written.
    """
    # Before the file is read, which may take long.
    write = None if plot is None else writer(plot)
    trace = Trace(path)
    curve = TraceCurve(rate, secrets.randbits(64))
    for blocks in trace:
        if blocks is None:
            curve.clear()
        else:
            curve.add(blocks)
    if not curve.accesses:
        raise ConfigError(f"{path}: no lookups of blocks")
    fractions = sorted({max(curve.distinct >> shift, 1) for shift in range(7)})
    points = curve.points(capacities or fractions)
    if write is not None:
        write(sorted(points), path.name)
    if as_json:
        found = {
            "accesses": curve.accesses,
            "distinct": curve.distinct,
            "curve": [point._asdict() for point in points],
        }
        click.echo(msgspec.json.encode(found))
    else:
        for line in _table(curve, points, block_size):
            click.echo(line)
    if not trace.has_hits:
        click.echo(
            "KV events have no lookups, only the blocks that were stored: the ratio is the share of"
            " these that a cache of that size would have kept",
            err=True,
        )


def _table(curve: TraceCurve, points: Sequence[Point], block_size: int | None) -> Iterator[str]:
    yield f"{curve.accesses:,} lookups of {curve.distinct:,} distinct blocks"
    tokens = f"{'tokens':>16}" if block_size else ""
    yield f"{'blocks':>12}{tokens}{'hit ratio':>11}{'95 % of the cases':>20}"
    for point in points:
        tokens = f"{point.blocks * block_size:>16,}" if block_size else ""
        bounds = f"{point.low:.2%} to {point.high:.2%}"
        yield f"{point.blocks:>12,}{tokens}{point.hit_ratio:>11.2%}{bounds:>20}"
