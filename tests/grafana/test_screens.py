"""The drawing of dashboards' pictures: numbers, axes, tables, stacks and PNG files."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.screens.page import ROW, table
from tools.screens.png import COLORS, SIGNATURE, chunk, chunks, paeth, smaller, unfiltered
from tools.screens.units import shown


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (0.00005, "s", "50 µs"),
        (1.5, "s", "1.5 s"),
        (90.0, "s", "1.5 min"),
        (7200.0, "s", "2 h"),
        (0.0, "s", "0 s"),
        (250.0, "ms", "250 ms"),
        (0.805, "percentunit", "80.5 %"),
        (97.0, "percent", "97 %"),
        (1536.0, "mbytes", "1.5 GiB"),
        (412.5, "watt", "412 W"),
        (56.1, "joule", "56.1 J"),
        (1536.0, "bytes", "1.5 KiB"),
        (3 * 1024.0**2, "Bps", "3 MiB/s"),
        (2230.0, "cps", "2.23 K c/s"),
        (0.0, "reqps", "0 req/s"),
        (1230.0, "count:tokens/s", "1.23 K tokens/s"),
        (1.2e9, "flops", "1.2 GFLOP/s"),
        (0.0, "flops", "0 FLOP/s"),
        (16.0, "short", "16"),
        (float("nan"), "s", "no traffic"),
        (0.0, "dateTimeAsIso", "1970-01-01 00:00:00"),
    ],
)
def test_numbers_have_units(value: float, unit: str, text: str) -> None:
    """Values are written in three digits with units, as Grafana does."""
    assert shown(value, unit) == text


@pytest.mark.parametrize(("room", "shown_rows", "more"), [(5, 4, ""), (4, 2, "and 2 more")])
def test_tables_say_what_does_not_fit(room: int, shown_rows: int, more: str) -> None:
    """A table shows whole rows, and how many are left out."""
    panel: dict[str, Any] = {"fieldConfig": {"overrides": []}}
    drawn = table(panel, [{"Engine": f"e{number}"} for number in range(4)], room * ROW)

    assert drawn.count("<td>e") == shown_rows
    assert more in drawn
    assert ("more" in drawn) == bool(more)


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
