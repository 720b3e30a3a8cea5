"""Faults of the disk: damaged files, and no space left."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from chaos import disk


def test_a_file_is_cut_or_has_one_bit_flipped(tmp_path: Path) -> None:
    """The seed decides where a file is cut, or which bit is flipped."""
    whole = bytes(range(256))
    path = tmp_path / "snapshot"
    (tmp_path / "empty.lock").touch()
    for seed in range(50):
        path.write_bytes(whole)
        assert disk.tear(tmp_path, Random(seed), cut=True).startswith("cut at byte")
        assert whole.startswith(path.read_bytes())
        assert len(path.read_bytes()) < len(whole)
        path.write_bytes(whole)
        disk.tear(tmp_path, Random(seed), cut=False)
        changed = [a ^ b for a, b in zip(whole, path.read_bytes(), strict=True) if a != b]

        assert [value.bit_count() for value in changed] == [1]


def test_nothing_to_damage_is_reported(tmp_path: Path) -> None:
    """Without a file to damage, the description of the fault is empty."""
    assert disk.tear(tmp_path, Random(1), cut=True) == ""


def test_a_filled_disk_has_no_space(tmp_path: Path) -> None:
    """A filled disk has no space for a byte until the filler is deleted."""
    with disk.small(tmp_path / "disk") as mounted:
        if not mounted:
            pytest.skip("needs root")
        filler = disk.fill(tmp_path / "disk")
        with pytest.raises(OSError, match="No space"):
            (tmp_path / "disk" / "more").write_bytes(b"x")
        filler.unlink()
        (tmp_path / "disk" / "more").write_bytes(b"x")
