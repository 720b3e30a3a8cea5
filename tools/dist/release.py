"""A release's version, time and sources, and archives that are byte for byte the same each time."""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sidestep import __version__

ROOT = Path(__file__).parents[2]
PLACEHOLDER = re.compile(
    r"(?<=sidestep:)dev\b|(?<=appVersion: )dev$|(?<=  tag: )dev$|0\.0\.0-dev$", re.MULTILINE
)
"""The version in deploy/ of a checkout; a release has its own there."""


@dataclass(frozen=True)
class Release:
    """A release that is being built.

    Attributes:
        version: The version of ``sidestep.__version__``.
        epoch: Unix time of the last commit, the time of all that is built.
        source: Copy of the files that git tracks, with the version in deploy/.
        target: Directory that gets the files.
    """

    version: str
    epoch: int
    source: Path
    target: Path

    def run(self, *command: object, cwd: Path | None = None) -> str:
        """Run a command at the release's time and return its output."""
        environ = {
            **os.environ, "SOURCE_DATE_EPOCH": str(self.epoch), "LC_ALL": "C.UTF-8", "TZ": "UTC",
        }  # fmt: skip
        return subprocess.run(
            [*map(str, command)],
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            cwd=cwd,
            env=environ,
        ).stdout

    def archive(self, name: str, members: Mapping[str, Path | str]) -> None:
        """Write an archive of files and texts by their names in it; ``.tar`` is not compressed."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for member, content in sorted(members.items()):
                data = content.encode() if isinstance(content, str) else content.read_bytes()
                entry = tarfile.TarInfo(member)
                entry.size, entry.mtime = len(data), self.epoch
                tar.addfile(entry, io.BytesIO(data))
        data = packed.getvalue()
        if not name.endswith(".tar"):
            data = gzip.compress(data, mtime=self.epoch)
        (self.target / name).write_bytes(data)


def files(folder: Path) -> dict[str, Path]:
    """Return the files below a folder by their relative paths."""
    return {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}


@contextmanager
def prepared(target: Path) -> Iterator[Release]:
    """Yield a release that writes to ``target``."""
    epoch = int(_git("log", "-1", "--format=%ct"))
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="sidestep-dist-") as made:
        source = Path(made, "source")
        _copy(_git("ls-files", "-z").rstrip("\0").split("\0"), source, epoch)
        yield Release(__version__, epoch, source, target.resolve())


def _git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True)


def _copy(names: Iterable[str], into: Path, epoch: int) -> None:
    for name in names:
        path, copy = ROOT / name, into / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        # As in a clone of any umask.
        copy.chmod(0o755 if os.access(path, os.X_OK) else 0o644)
        if name.startswith("deploy/"):
            copy.write_text(PLACEHOLDER.sub(__version__, copy.read_text()))
        os.utime(copy, (epoch, epoch))
