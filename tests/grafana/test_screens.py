"""The drawing of dashboards' pictures: numbers, axes, tables, stacks and PNG files."""

from __future__ import annotations

import re
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.boards.panels import Panel, Query
from tools.boards.shapes import tile
from tools.screens.answers import Series, Span
from tools.screens.charts import STATES, lines, parts, stack, timeline
from tools.screens.page import ROW, alerts, table, threshold
from tools.screens.png import COLORS, SIGNATURE, chunk, chunks, paeth, smaller, unfiltered
from tools.screens.units import shown, ticks


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


@given(st.floats(1e-9, 1e15), st.sampled_from(["short", "bytes"]))
def test_ticks_reach_as_far_as_values(most: float, unit: str) -> None:
    """Ticks begin at 0 and are evenly spaced; at most one is above the highest value."""
    found = ticks(most, unit)

    assert found[0] == 0
    assert found[-1] >= most * (1 - 1e-9)
    assert found[-2] < most
    assert 2 <= len(found) <= 6


def test_bytes_have_ticks_of_their_own() -> None:
    """Ticks of bytes are round in binary units."""
    assert ticks(1.5 * 1024**2, "bytes") == [0, 2**19, 2**20, 3 * 2**19]


def test_the_axis_includes_limits() -> None:
    """The axis includes the limits of a panel, each drawn as a line."""
    drawn = []
    for limits_ in ((0.8, 1.0), None):
        panel = Panel(
            title="t",
            says="s",
            empty="e",
            queries=[Query("up")],
            unit="percentunit",
            limits=limits_,
        ).made(1, 0, 0)
        found = [Series("a", {}, {1.0: 0.1, 2.0: 0.2})]
        drawn.append(lines(panel, found, Span(0.0, 10.0, 1.0), 400, 200))

    assert [each.count("stroke-dasharray") for each in drawn] == [2, 0]
    assert [">100 %<" in each for each in drawn] == [True, False]


def test_only_numbers_with_limits_are_coloured() -> None:
    """A tile without limits has no color."""
    tiles = [tile("t", "s", "e", "up", limits=limits_).made(1, 0, 0) for limits_ in ((1, 2), None)]

    assert [threshold(each, 0.0) for each in tiles] == [STATES["green"], STATES["text"]]


@pytest.mark.parametrize(("room", "shown_rows", "more"), [(5, 4, ""), (4, 2, "and 2 more")])
def test_tables_say_what_does_not_fit(room: int, shown_rows: int, more: str) -> None:
    """A table shows whole rows, and how many are left out."""
    panel: dict[str, Any] = {"fieldConfig": {"overrides": []}}
    drawn = table(panel, [{"Engine": f"e{number}"} for number in range(4)], room * ROW)

    assert drawn.count("<td>e") == shown_rows
    assert more in drawn
    assert ("more" in drawn) == bool(more)


@pytest.mark.parametrize(("height", "lines_", "more"), [(100, 3, ""), (70, 1, "and 2 more")])
def test_alert_lists_show_alerts(height: int, lines_: int, more: str) -> None:
    """An alert list has a line for each alert, and the number of those left out."""
    found = [
        {"alertname": name, "alertstate": "firing", "model_name": "<m>"}
        for name in ("InferenceA", "InferenceB", "InferenceB")
    ]
    drawn = alerts(found, height)

    assert drawn.count("&lt;m&gt;") == drawn.count("<b>Inference") == lines_
    assert re.findall(r"and \d+ more", drawn) == [more] * bool(more)
    assert "No alerts" in alerts([], height)


@pytest.mark.parametrize(("height", "bars", "more"), [(130, 6, ""), (84, 2, "and 4 more")])
def test_timelines_have_a_bar_for_each_engine(height: int, bars: int, more: str) -> None:
    """A timeline has a bar in the state's color for each series, and the number of those left out."""
    panel = Panel(
        title="t",
        says="s",
        empty="e",
        queries=[Query("up")],
        kind="state-timeline",
        states={"ok": "green", "stalled": "red"},
    ).made(1, 0, 0)
    values = {1.0: 1.0, 2.0: 1.0, 3.0: 2.0}
    found = [Series(f"e{number}", {}, values) for number in range(6)]
    drawn = timeline(panel, found, Span(0.0, 10.0, 1.0), 400, height)

    assert drawn.count(f'fill="{STATES["green"]}"') == bars
    assert drawn.count(f'fill="{STATES["red"]}"') == bars
    assert re.findall(r"and \d+ more", drawn) == [more] * bool(more)
    assert [f">{state}<" in drawn for state in ("ok", "stalled")] == [True, True]


def test_parts_of_a_stack_add_up() -> None:
    """Each part of a stack begins where the one below ends; gaps stay gaps."""
    low = Series("a", {}, {1.0: 1.0, 2.0: 2.0})
    high = Series("b", {}, {2.0: 5.0, 3.0: 1.0})

    assert stack([low, high]) == [(low.values, {}), ({2.0: 7.0, 3.0: 1.0}, low.values)]
    assert parts({1: 0.0, 2: 0.0, 5: 0.0}, 1.0) == [[1, 2], [5]]


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
