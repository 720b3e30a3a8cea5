"""The reduction of dashboards' pictures to a palette."""

from __future__ import annotations

import struct
import zlib

from hypothesis import given
from hypothesis import strategies as st
from tools.screens.png import COLORS, SIGNATURE, chunk, chunks, paeth, smaller, unfiltered


def filtered(line: bytes, above: bytes, kind: int, depth: int) -> bytes:
    """Apply one of PNG's filters to a line."""
    made = bytearray([kind])
    for at, value in enumerate(line):
        left = line[at - depth] if at >= depth else 0
        corner = above[at - depth] if at >= depth else 0
        guess = (0, left, above[at], (left + above[at]) // 2, paeth(left, above[at], corner))[kind]
        made.append((value - guess) & 255)
    return bytes(made)


@given(st.data())
def test_reduction_to_a_palette_keeps_every_pixel(data: st.DataObject) -> None:
    """Reduction to a palette keeps every pixel, whatever filters the file uses."""
    depth = data.draw(st.sampled_from([3, 4]))
    width, height = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    colors = data.draw(
        st.lists(st.tuples(*[st.integers(0, 255)] * 3), min_size=1, max_size=COLORS, unique=True)
    )
    pixels = data.draw(
        st.lists(st.sampled_from(colors), min_size=width * height, max_size=width * height)
    )
    lines = [
        b"".join(bytes(p) + b"\xff" * (depth - 3) for p in pixels[row * width : (row + 1) * width])
        for row in range(height)
    ]
    above = [bytes(width * depth), *lines]
    stored = b"".join(
        filtered(line, above[n], data.draw(st.integers(0, 4)), depth)
        for n, line in enumerate(lines)
    )
    head = struct.pack(">IIBBBBB", width, height, 8, {3: 2, 4: 6}[depth], 0, 0, 0)
    parts_ = ((b"IHDR", head), (b"IDAT", zlib.compress(stored)), (b"IEND", b""))
    made = dict(chunks(smaller(SIGNATURE + b"".join(chunk(*part) for part in parts_))))
    palette = made[b"PLTE"]
    rows = unfiltered(zlib.decompress(made[b"IDAT"]), width, 1)

    assert made[b"IHDR"] == struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    assert [tuple(palette[3 * n : 3 * n + 3]) for row in rows for n in row] == pixels
