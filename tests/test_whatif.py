"""The command ``sidestep whatif``, as a user runs it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import one_line, sidestep
from prefix_caches import BLOCK_SIZE, PrefixCache, conversations
from sidestep.errors import ConfigError
from sidestep.protocol.cache_lookups import CacheLookups, Lookup, Released
from sidestep_adapters.recording.format import Items, Writer
from sidestep_tools.whatif import estimate
from sidestep_tools.whatif.estimate import DistinctBlocks, TraceCurve, keys_of
from sidestep_tools.whatif.trace import Trace

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


def test_the_table_has_tokens(trace: Path) -> None:
    """A plain file is read as a compressed one; of few blocks all are in the sample."""
    plain = trace.with_suffix("")
    plain.write_bytes(gzip.decompress(trace.read_bytes()))

    done = sidestep("whatif", plain, "--block-size", 16)

    assert "80 lookups of 23 distinct blocks" in done.stdout
    assert done.stdout.splitlines()[-1].split()[:3] == ["23", "368", "71.25%"]
    assert done.stderr == ""


def test_the_plot_is_a_picture(trace: Path, tmp_path: Path) -> None:
    """It is well-formed SVG with a point for each capacity, whatever bytes the file's name has."""
    odd, picture = tmp_path / os.fsdecode(b"a<b>&\xff\x01.gz"), tmp_path / "curve.svg"
    trace.rename(odd)

    done = sidestep("whatif", odd, "--sample-rate", 1, "--capacity", "23,1,4", "--plot", picture)

    assert done.returncode == 0, done.stderr
    root = ET.parse(picture).getroot()
    assert "a<b>&??.gz" in "".join(root.itertext())
    *_, line = root.iter("{http://www.w3.org/2000/svg}polyline")
    places = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert len(places) == 3
    assert places == sorted(places)
    assert places[0][1] > places[1][1] == places[2][1]


@pytest.mark.parametrize(
    ("capture", "stored", "distinct"),
    [
        ("kv_events_main", 432, 348),
        ("vllm_kv_events", 432, 348),
        ("sglang_kv_events", 5438, 5438),
        ("sglang_kv_events_dp2_rank0", 246, 246),
        ("trtllm/kv_events_made", 11, 11),
    ],
)
def test_a_capture_of_kv_events_has_stored_blocks_only(
    capture: str, stored: int, distinct: int
) -> None:
    """Captures of all engines are read, and a remark says what they lack."""
    done = sidestep("whatif", DATA / f"{capture}.jsonl.gz", "--sample-rate", 1, "--json")

    found = json.loads(done.stdout)
    assert (found["accesses"], found["distinct"]) == (stored, distinct)
    assert "KV events have no lookups" in done.stderr


def stored(*hashes: object, **fields: object) -> dict[str, object]:
    """Return an event of stored blocks."""
    return {"type": "BlockStored", "block_hashes": hashes, **fields}


FORMS: dict[str, list[object]] = {
    "maps": [[1.0, [stored(1, -2), {"type": "BlockRemoved", "block_hashes": [1]}], None]],
    "arrays": [[1.0, [["BlockStored", [1, -2], None, [5] * 32, 16, None, "GPU", None, None, 0]]]],
    "short": [[1.0, [["stored", [1, -2], "GPU"], ["removed", [1], "GPU"]]]],
    "map of maps": [{"ts": 1.0, "events": [stored(1, -2, medium="GPU")]}],
    "messages": [["kv@here@model", 7, [1.0, [stored(1, -2)], 0]]],
    "as sent": [{"payload": msgspec.msgpack.encode([1.0, [stored(b"\1" * 32, b"\2")]]).hex()}],
    "text": [[1.0, [stored("0x1f", "b64=")]]],
    "other media": [[1.0, [stored(1, -2), stored(1, -2, 3, medium="CPU"), ["Other"]]]],
    "after empty lines": ["", [1.0, []], [1.0, [stored(1, -2)]]],
}


@pytest.mark.parametrize("form", FORMS)
def test_captures_have_many_forms(form: str, tmp_path: Path) -> None:
    """Blocks that the cache itself stored are the lookups."""
    path = tmp_path / "capture.jsonl"
    path.write_text("".join(json.dumps(line) * (line != "") + "\n" for line in FORMS[form]))

    (blocks,) = Trace(path)

    assert blocks is not None
    assert len({*blocks}) == 2


def test_a_cleared_cache_finds_nothing_of_before(tmp_path: Path) -> None:
    """Groups of layers have blocks of their own, and a clear makes all uses first ones."""
    path = tmp_path / "capture.jsonl"
    used = [stored(1, group_idx=0), stored(1, group_idx=1), stored(1, group_idx=0)]
    lines = [[1.0, [*used, {"type": "AllBlocksCleared"}, *used, *used, ["cleared", [], ""]]]]
    path.write_text("\n".join(map(json.dumps, lines)))

    done = sidestep("whatif", path, "--sample-rate", 1, "--capacity", "1,2", "--json")

    found = json.loads(done.stdout)
    assert (found["accesses"], found["distinct"]) == (9, 2)
    ratios = [point["hit_ratio"] for point in found["curve"]]
    assert ratios == [pytest.approx(1 / 9), pytest.approx(5 / 9)]


def record(writer: Writer, stream: str, cache: PrefixCache, seed: int) -> None:
    """Record the lookups of conversations in an engine's cache, one after the other."""
    for number, request in enumerate(conversations(1500, seed, active=30)):
        found = cache.admit(request) // BLOCK_SIZE
        prompt, output = (
            [int.from_bytes(block[:8], "big") for block in blocks]
            for blocks in (request.prompt, request.output)
        )
        blocks = (request.tokens - 1) // BLOCK_SIZE
        lookup = Lookup(
            number, number + 0.1, request.tokens, blocks, found,
            sampled=prompt, sampled_found=found,
        )  # fmt: skip
        cache.release(request)
        released = Released(number, number + 0.2, len(prompt), output)
        item = CacheLookups(0, number + 0.2, 1, 1.0, BLOCK_SIZE, 0, 800, 0, [lookup, released])
        raw = msgspec.Raw(msgspec.msgpack.encode(item))
        writer.write(Items(float(number), stream, [raw]))


def test_a_recording_has_the_curve_of_its_engines(tmp_path: Path) -> None:
    """What another cache hits is what one of that size would have hit, in tokens."""
    path = tmp_path / "a.rec"
    writer = Writer(path)
    caches = {capacity: PrefixCache(capacity) for capacity in (400, 800, 1600)}
    for seed in (3, 4):
        record(writer, f"engine {seed}", PrefixCache(800), seed)
        for cache in caches.values():
            cache.clear()
            for request in conversations(1500, seed, active=30):
                cache.admit(request)
                cache.release(request)
    writer.close()

    done = sidestep("whatif", path, "--capacity", "400,800,1600", "--json")

    for point in json.loads(done.stdout)["curve"]:
        cache = caches[point["blocks"]]
        assert point["hit_ratio"] == pytest.approx(cache.found / cache.tokens, abs=0.01)
    table = sidestep("whatif", path).stdout.splitlines()
    assert table[1].split()[:2] == ["blocks", "tokens"]
    assert [int(line.split()[0].replace(",", "")) for line in table[2:]] == [
        6400 >> shift for shift in range(7, -1, -1)
    ]


LINES = [json.dumps(line).encode() for lines in FORMS.values() for line in lines if line]
LINES += [b'{"timestamp": 1, "hash_ids": [1, -2, "a", 18446744073709551616]}', b"{}", b"[]"]
NESTED = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "events", "payload", "block_hashes", "hash_ids", "call"]),
            inner,
        )
    ),
    max_leaves=8,
)
DAMAGE = (
    st.binary(max_size=40)
    | NESTED.map(lambda value: json.dumps(value).encode())
    | st.sampled_from([b"[" * 100_000, b'{"hash_ids":' * 9000, b'{"hash_ids": [1' + b"0" * 9999])
)


@given(st.lists(st.sampled_from(LINES) | DAMAGE, max_size=4), st.floats(0, 1), st.booleans())
def test_damage_is_one_line(lines: list[bytes], cut: float, is_gzip: bool) -> None:
    """Whatever is in a file, it is a curve or one clear line."""
    content = b"\n".join(lines)
    content = gzip.compress(content, mtime=0) if is_gzip else content
    with tempfile.NamedTemporaryFile() as file:
        file.write(content[: int(len(content) * cut) if cut < 0.9 else None])
        file.flush()
        curve = TraceCurve(1.0, 1)
        try:
            for blocks in Trace(Path(file.name)):
                if blocks is None:
                    curve.clear()
                else:
                    curve.add(blocks)
        except ConfigError as error:
            message = str(error)
        else:
            message = file.name
    assert file.name in message
    assert message.isprintable()
    for point in curve.points([1, 2, 100]):
        assert 0 <= point.low <= point.hit_ratio <= point.high <= 1


def test_a_long_line_takes_little_memory(tmp_path: Path) -> None:
    """A compressed file of 200 MB without a line end is one clear line."""
    path = tmp_path / "long"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(200):
            file.write(b'{"hash_ids": [' + b"1, " * 340_000)
    command = f"ulimit -v 1000000; {sys.executable} -m sidestep whatif {path}"

    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)

    one_line(done, 2, "line 1 is longer than 8 MiB")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no lookups of blocks"),
        (b'{"hash_ids": []}\n', "no lookups of blocks"),
        (b'{"hash_ids": [1]}\n{"x": 1}\n', "line 2 is not a request with hash_ids"),
        (b"[1.0, 5]\n", "line 1 is not a batch of KV events"),
        (b"\x1f\x8b\x08\x00", "is cut short or damaged"),
        (gzip.compress(b'{"hash_ids": [1]}\n' * 99, mtime=0)[:-9], "is cut short or damaged"),
        (b"sidestep recording 1\n", "the recording has no lookups"),
        (b"sidestep recording 1\n123", "cut short at byte 21"),
        (b"sidestep recording 1\n\0\0\0\3\x91\xa1\r", "damaged at byte 21: Invalid value '?'"),
        (b'["", 6, {"version": 1}]\n', "line 1 is not a batch of KV events: no list of events"),
        (b'[1.0, [{"type": "BlockStored"}]]', "an event has neither a kind nor hashes"),
        (b'[1.0, [["stored", [1.5], "GPU"]]]', "a hash is neither a number nor text"),
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
        (["--capacity", "9" * 400], "must be numbers of blocks above 0"),
        (["--sample-rate", "0"], "--sample-rate"),
        (["--plot", "curve.png"], "must end with .svg"),
        (["--plot", "/no/such/folder/a.svg"], "cannot write"),
    ],
)
def test_a_wrong_option_is_one_line(trace: Path, options: list[str], message: str) -> None:
    """It says what is expected."""
    one_line(sidestep("whatif", trace, *options), 2, message)


def test_many_distinct_blocks_are_counted_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bitmap's error is a fraction of a per cent."""
    monkeypatch.setattr(estimate, "EXACT", 1000)
    monkeypatch.setattr(estimate, "BITS", 1 << 20)
    blocks = DistinctBlocks()
    for start in range(0, 200_000, 100):
        blocks.add(keys_of(range(start, start + 100), 5))
        blocks.add(keys_of(range(start // 2, start // 2 + 25), 5))
        if start == 900:
            assert float(blocks) == 1000

    assert float(blocks) == pytest.approx(200_000, rel=0.003)
