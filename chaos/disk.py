"""A small disk that fills up, and damage to files."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

SIZE = "4m"


@contextmanager
def small(folder: Path) -> Iterator[bool]:
    """Mount a disk of 4 MiB on ``folder``; return whether that was possible."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "chaos", str(folder)]
    mounted = os.geteuid() == 0 and not subprocess.run(command, check=False).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(folder: Path) -> Path:
    """Write a file that takes all free space."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return path


def tear(folder: Path, random: Random, *, cut: bool) -> str:
    """Damage every file with content; return a description, empty if there is none."""
    done = ""
    for path in sorted(folder.iterdir()):
        data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        if not data:
            continue
        if cut:
            place = random.randrange(len(data))
            done = f"cut at byte {place} of {len(data)}"
            del data[place:]
        else:
            place = random.randrange(8 * len(data))
            done = f"flipped in bit {place} of {8 * len(data)}"
            data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
    return done
