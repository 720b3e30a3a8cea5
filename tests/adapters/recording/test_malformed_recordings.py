"""Error lines for recordings that cannot be read."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from sidestep.errors import ConfigError
from sidestep_adapters.recording.replay import Replay

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
