"""The curve as a picture, in SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sidestep.tracking.kv_blocks.hit_curve import Point

WIDTH, HEIGHT, MARGIN = 720, 420, 60
FONT = 'font-family="sans-serif" font-size="12"'


def svg(points: Sequence[Point], title: str) -> str:
    """Return the curve with its bounds: hit ratio over capacity, which doubles at equal steps.

    Args:
        points: In ascending order.
        title: Text without markup.
    """
    first, last = (math.log2(points[at].blocks) for at in (0, -1))
    scale = (WIDTH - 2 * MARGIN) / (last - first or 1.0)

    def left(blocks: int) -> str:
        return f"{MARGIN + (math.log2(blocks) - first) * scale:.1f}"

    def top(ratio: float) -> str:
        return f"{HEIGHT - MARGIN - ratio * (HEIGHT - 2 * MARGIN):.1f}"

    line = " ".join(f"{left(one.blocks)},{top(one.hit_ratio)}" for one in points)
    band = [f"{left(one.blocks)},{top(one.low)}" for one in points]
    band += [f"{left(one.blocks)},{top(one.high)}" for one in reversed(points)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="30" text-anchor="middle" font-size="15">{title}</text>',
    ]
    for percent in range(0, 101, 20):
        height = top(percent / 100)
        parts.append(
            f'<path d="M{MARGIN},{height}H{WIDTH - MARGIN}" stroke="#ddd"/>'
            f'<text x="{MARGIN - 8}" y="{height}" text-anchor="end">{percent} %</text>'
        )
    parts += [
        f'<text x="{left(one.blocks)}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">'
        f"{_short(one.blocks)}</text>"
        for one in points
    ]
    parts += [
        f'<polygon points="{" ".join(band)}" fill="#1f77b4" opacity="0.2"/>',
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="2"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">capacity in blocks</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _short(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
