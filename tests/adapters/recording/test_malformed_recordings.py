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
MALFORMED = {
    "empty": (b"", "this is no recording of sidestep record"),
    "text": (b"hello\n", "this is no recording of sidestep record"),
    "times without end": (
        b"sidestep recording 1\n\x00\x00\x00\x0e\x94\xa1I\xcb\x7f\xf0\0\0\0\0\0\0\xa0\x90",
        "damaged at byte 21: its time is inf",
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


@pytest.mark.parametrize("start", [b"", b"sidestep recording 1\n"], ids=["", "own"])
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
