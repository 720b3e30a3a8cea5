"""The command ``sidestep whatif``, as a user runs it."""

from __future__ import annotations

import gzip
import json
import os
import statistics
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from PIL import Image

from command_line import one_line, sidestep
from sidestep.whatif import estimate
from sidestep.whatif.estimate import DistinctBlocks, mix
from sidestep.whatif.plot import HEIGHT, MARGIN
from sidestep.whatif.png import SCALE

DATA = Path(__file__).parent / "data"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace: one prefix of three blocks in each of 20 requests, and a block of its own."""
    path = tmp_path / "trace.jsonl.gz"
    lines = [json.dumps({"timestamp": 0, "hash_ids": [1, 2, 3, 100 + n]}) for n in range(20)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_the_json_is_the_curve(trace: Path) -> None:
    """All lookups and blocks are counted; with all blocks sampled the curve is exact."""
    done = sidestep("whatif", trace, "--sample-rate", 1, "--capacity", "3,4,23", "--json")

    assert json.loads(done.stdout) == {
        "accesses": 80,
        "distinct": 23,
        "curve": [
            {"blocks": n, "hit_ratio": ratio, "low": ratio, "high": ratio}
            for n, ratio in [(3, 0.0), (4, 57 / 80), (23, 57 / 80)]
        ],
    }
    assert done.stderr == ""


def test_the_table_has_tokens_and_a_remark_on_small_samples(trace: Path) -> None:
    """A plain file is read as a compressed one."""
    plain = trace.with_suffix("")
    plain.write_bytes(gzip.decompress(trace.read_bytes()))

    done = sidestep("whatif", plain, "--block-size", 16, "--sample-rate", 0.5)

    assert "80 lookups of 23 distinct blocks" in done.stdout
    assert done.stdout.splitlines()[-1].split()[:2] == ["23", "368"]
    assert "--sample-rate 1 gives a curve to rely on" in done.stderr


def test_the_plot_is_a_picture(trace: Path, tmp_path: Path) -> None:
    """It is well-formed SVG with a point for each capacity."""
    picture = tmp_path / "curve.svg"

    sidestep("whatif", trace, "--sample-rate", 1, "--capacity", "23,1,4", "--plot", picture)

    *_, line = ET.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}polyline")
    places = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert len(places) == 3
    assert places == sorted(places)
    assert places[0][1] > places[1][1] == places[2][1]


def test_the_plot_is_a_picture_in_pixels(trace: Path, tmp_path: Path) -> None:
    """Its line has the colour and the height of the curve, and one capacity alone is a picture too."""
    picture = tmp_path / "curve.PNG"

    for capacities in ("4,23", "4"):
        sidestep("whatif", trace, "--sample-rate", 1, "--capacity", capacities, "--plot", picture)

        with Image.open(picture) as image:
            assert image.format == "PNG"
            if capacities == "4,23":
                middle = image.width // 2
                column = [image.getpixel((middle, top)) for top in range(image.height)]
                drawn = [top for top, colour in enumerate(column) if colour == (0x1F, 0x77, 0xB4)]
                ratio = 1 - (statistics.fmean(drawn) / SCALE - MARGIN) / (HEIGHT - 2 * MARGIN)
                assert ratio == pytest.approx(57 / 80, abs=0.005)


def test_without_the_library_a_picture_in_pixels_is_one_line(trace: Path, tmp_path: Path) -> None:
    """It says what to install, and what needs nothing."""
    (tmp_path / "PIL.py").write_text("raise ImportError")

    done = sidestep("whatif", trace, "--plot", tmp_path / "a.png", PYTHONPATH=str(tmp_path))

    one_line(done, 2, "PNG needs Pillow: pip install 'sidestep[plot]'")


def test_a_name_of_a_file_is_text_in_the_picture(trace: Path, tmp_path: Path) -> None:
    """Markup and bytes that are no text in a name leave the picture well-formed."""
    odd = tmp_path / os.fsdecode(b"a<b>&\xff\x01.gz")
    trace.rename(odd)
    picture = tmp_path / "curve.svg"

    done = sidestep("whatif", odd, "--plot", picture)

    assert done.returncode == 0, done.stderr
    assert "a<b>&??.gz" in "".join(ET.parse(picture).getroot().itertext())


def test_a_capture_of_kv_events_has_stored_blocks_only() -> None:
    """A remark says so."""
    done = sidestep("whatif", DATA / "kv_events_main.jsonl.gz", "--sample-rate", 1, "--json")

    assert json.loads(done.stdout)["accesses"] == 432
    assert "KV events have no lookups" in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no lookups of blocks"),
        (b'{"hash_ids": []}\n', "no lookups of blocks"),
        (b'{"hash_ids": [1]}\n{"x": 1}\n', "line 2 is not a request with hash_ids"),
        (b"[1.0, 5]\n", "line 1 is not a batch of KV events"),
        (b"\xff\xfe\n", "line 1 is not a request"),
        (b"\x1f\x8b\x08\x00", "is cut short or damaged"),
        (gzip.compress(b'{"hash_ids": [1]}\n' * 99, mtime=0)[:-9], "is cut short or damaged"),
        (b"sidestep recording 1\n", "a recording has no lookups"),
    ],
)
def test_a_file_without_lookups_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    """It says what is wrong where."""
    path = tmp_path / "trace"
    path.write_bytes(content)

    one_line(sidestep("whatif", path, "--sample-rate", 1), 2, message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--capacity", "5,x"], "must be numbers of blocks above 0"),
        (["--capacity", "0"], "must be numbers of blocks above 0"),
        (["--sample-rate", "0"], "--sample-rate"),
        (["--sample-rate", "2"], "--sample-rate"),
        (["--plot", "curve.pdf"], "must end with .svg or .png"),
        (["--plot", "/no/such/folder/a.svg"], "cannot write"),
    ],
)
def test_a_wrong_option_is_one_line(trace: Path, options: list[str], message: str) -> None:
    """It says what is expected."""
    one_line(sidestep("whatif", trace, *options), 2, message)


def test_a_missing_file_is_one_line() -> None:
    """It names the file."""
    one_line(sidestep("whatif", "/no/such/file"), 2, "cannot read /no/such/file")


def test_many_distinct_blocks_are_counted_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bitmap's error is a fraction of a per cent."""
    monkeypatch.setattr(estimate, "EXACT", 1000)
    monkeypatch.setattr(estimate, "BITS", 1 << 20)
    blocks = DistinctBlocks()
    for number in range(200_000):
        blocks.add(mix(number, 5))
        if number % 4 == 0:
            blocks.add(mix(number // 2, 5))
        if number == 998:
            assert float(blocks) == 999

    assert float(blocks) == pytest.approx(200_000, rel=0.003)
