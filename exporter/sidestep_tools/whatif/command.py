"""The command ``sidestep whatif``: it reads a file and shows the hit-ratio curve."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from sidestep.errors import ConfigError
from sidestep.tracking.kv_blocks.hit_ratio_curve import Point
from sidestep_tools.whatif.estimate import RecordedCurve, TraceCurve, is_recording
from sidestep_tools.whatif.plot import check_name, write
from sidestep_tools.whatif.trace import Trace

STORED_ONLY = (
    "KV events have no lookups, only the blocks that were stored: the ratio is the share of these"
    " that a cache of that size would have kept"
)


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
    if plot is not None:
        # Checked before the file is read, which may take long.
        check_name(plot)
    curve, sizes, remark = _read(path, rate)
    if not curve.accesses:
        raise ConfigError(f"{path}: no lookups of blocks")
    points = curve.points(capacities or sizes)
    if plot is not None:
        write(plot, sorted(points), path.name)
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
