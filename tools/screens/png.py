"""Reduction of PNG files to a palette, which is enough for text and charts."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Collection
from itertools import chain

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLORS = 64
"""Number of colors of the palette, including those to keep."""
DEPTHS = {2: 3, 6: 4}
"""Bytes of a pixel by PNG's color type; the fourth is opacity, which is not used here."""

Color = tuple[int, int, int]


def smaller(picture: bytes, keep: Collection[Color] = ()) -> bytes:
    """Return the same picture with a palette of its most frequent colors.

    Args:
        picture: A PNG of 8 bits a channel, not interlaced, as browsers make them.
        keep: Colors to keep, however rare they are.
    """
    width, height, kind = struct.unpack(">IIxB", picture[16:26])
    depth = DEPTHS[kind]
    packed = b"".join(data for name, data in chunks(picture) if name == b"IDAT")
    lines = unfiltered(zlib.decompress(packed), width * depth, depth)
    pixels = [
        list(zip(line[::depth], line[1::depth], line[2::depth], strict=True)) for line in lines
    ]
    found = Counter(chain.from_iterable(pixels))
    kept = [color for color in keep if color in found]
    often = [color for color, _ in found.most_common() if color not in kept]
    palette = [*kept, *often][:COLORS]
    index = {color: nearest(color, palette) for color in found}
    rows = b"".join(b"\0" + bytes(map(index.__getitem__, line)) for line in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    return SIGNATURE + b"".join(
        chunk(name, data)
        for name, data in (
            (b"IHDR", head),
            (b"PLTE", bytes(chain.from_iterable(palette))),
            (b"IDAT", zlib.compress(rows, 9)),
            (b"IEND", b""),
        )
    )


def nearest(color: Color, palette: list[Color]) -> int:
    """Return the index of the closest color in ``palette``."""
    r, g, b = color
    return min(
        range(len(palette)),
        key=lambda n: (
            (palette[n][0] - r) ** 2 + (palette[n][1] - g) ** 2 + (palette[n][2] - b) ** 2
        ),
    )


def chunks(picture: bytes) -> list[tuple[bytes, bytes]]:
    """Yield name and data of each chunk."""
    found = []
    at = len(SIGNATURE)
    while at < len(picture):
        (length,) = struct.unpack_from(">I", picture, at)
        found.append((picture[at + 4 : at + 8], picture[at + 8 : at + 8 + length]))
        at += 12 + length
    return found


def chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk with its length and checksum."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def unfiltered(data: bytes, size: int, depth: int) -> list[bytearray]:
    """Return lines of ``size`` bytes without PNG's filters."""
    lines: list[bytearray] = []
    above = bytearray(size)
    for start in range(0, len(data), size + 1):
        kind, line = data[start], bytearray(data[start + 1 : start + 1 + size])
        if kind == 2:
            line = bytearray((a + b) & 255 for a, b in zip(line, above, strict=True))
        elif kind:
            for at in range(size):
                left = line[at - depth] if at >= depth else 0
                corner = above[at - depth] if at >= depth else 0
                guess = {1: left, 3: (left + above[at]) // 2}.get(kind)
                line[at] = (
                    line[at] + (paeth(left, above[at], corner) if guess is None else guess)
                ) & 255
        lines.append(line)
        above = line
    return lines


def paeth(left: int, above: int, corner: int) -> int:
    """Return PNG's Paeth predictor."""
    guess = left + above - corner
    return min((left, above, corner), key=lambda each: abs(guess - each))
