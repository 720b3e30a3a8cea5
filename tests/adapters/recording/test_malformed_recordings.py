"""Error lines for recordings that cannot be read."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from sidestep.errors import ConfigError
from sidestep_adapters.recording.replay import Replay

MIB = 1 << 20
INIT = (
    b'{"call": "__init__", "t_mono": 1, "model": "m", "max_model_len": 9,'
    b' "engine_indexes": [0], %b}\n'
)
MALFORMED = {
    "empty": (b"", "neither a sidestep recording nor JSON lines"),
    "text": (b"hello\n", "neither a sidestep recording nor JSON lines"),
    "broken line": (b'{"call": "__init__"\n', "line 1 is no stat-logger call"),
    "no time": (b'{"call": "record"}\n', "line 1 is no stat-logger call"),
    "no init": (b'{"call": "record", "t_mono": 1}\n', "no __init__ call of its process"),
    "bad init": (b'{"call": "__init__", "t_mono": 1}\n', "lacks a field"),
    "bad options": (INIT % b'"observability": [1]', "lacks a field"),
    "bad buckets": (INIT % b'"observability": {"custom_histogram_buckets": [1]}', "lacks a field"),
    "endless time": (b'{"call": "record", "t_mono": ' + b"9" * 400 + b"}\n", "line 1 is no"),
    "no time at all": (b'{"call": "record", "t_mono": NaN}\n', "its time is nan"),
    "time without end": (
        INIT % b'"x": 1' + b'{"call": "record", "t_mono": 1e300}\n',
        "line 2 is no stat-logger call: its time is 1e+300",
    ),
    "times without end": (
        b"sidestep recording 1\n\x00\x00\x00\x0e\x94\xa1I\xcb\x7f\xf0\0\0\0\0\0\0\xa0\x90",
        "damaged at byte 21: its time is inf",
    ),
    "bad engine": (
        INIT % b'"x": 1' + b'{"call": "record", "t_mono": 1, "engine_idx": "x"}\n',
        "line 2: invalid literal",
    ),
    "cut gzip": (gzip.compress(b"{}" * 1000)[:-20], "cut short or damaged"),
    "cut recording": (b"sidestep recording 1\n\x00\x00\x00\x09abc", "cut short at byte 21"),
    "damaged recording": (b"sidestep recording 1\n\x00\x00\x00\x01\xc1", "damaged at byte 21"),
    "empty recording": (b"sidestep recording 1\n", "the recording is empty"),
}


@pytest.mark.parametrize(("content", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_recording_is_an_error(content: bytes, message: str, tmp_path: Path) -> None:
    """The error has the position in the file; nothing is sent."""
    file = tmp_path / "recording"
    file.write_bytes(content)

    with pytest.raises(ConfigError) as error:
        Replay(file, f"ipc://{tmp_path}/x", realtime=False, namespace="test").run()
    assert message in str(error.value)


@pytest.mark.parametrize("start", [b"", b"{", b"sidestep recording 1\n"], ids=["", "json", "own"])
@pytest.mark.parametrize("opener", [open, gzip.open])
def test_a_file_of_zeros_takes_little_memory(start: bytes, opener: Any, tmp_path: Path) -> None:
    """However long it is, and however small it was compressed."""
    file = tmp_path / "recording"
    with opener(file, "wb") as written:
        written.write(start)
        for _ in range(64):
            written.write(bytes(MIB))
    tracemalloc.start()
    with pytest.raises(ConfigError):
        Replay(file, f"ipc://{tmp_path}/x", realtime=False, namespace="test")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 32 * MIB
