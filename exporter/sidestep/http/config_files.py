"""Reading the files of the web configuration, and seeing that one has changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sidestep.errors import ConfigError

MAX_CONFIG_BYTES = 256 * 1024
MAX_PEM_BYTES = 1024 * 1024

FileIdentity = tuple[int, int, int, int] | None
"""Of a file's content, as far as stat tells; None where there is no file."""


class WatchedFiles:
    """Reads files, and remembers what each one was, so that a change can be seen.

    Attributes:
        seen: Every file that was asked for, read or not.
    """

    def __init__(self) -> None:
        self.seen: dict[Path, FileIdentity] = {}

    def read(self, path: Path, limit: int) -> bytes:
        """The content of ``path``.

        Raises:
            ConfigError: It cannot be read, is no file, or has more than ``limit`` bytes.
        """
        # Before reading: what is written meanwhile is a change.
        self.seen[path] = file_identity(path)
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ConfigError(f"cannot read {path}: it is not a file")
            with path.open("rb") as file:
                content = file.read(limit + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"cannot read {path}: {reason}") from None
        if len(content) > limit:
            raise ConfigError(f"cannot read {path}: it has more than {limit} bytes")
        return content

    def changed(self) -> bool:
        """Whether any of them is another now; one stat each."""
        return any(file_identity(path) != known for path, known in self.seen.items())


def file_identity(path: Path) -> FileIdentity:
    """What tells this content of ``path`` from another; a renamed link as well."""
    try:
        found = os.stat(path)  # noqa: PTH116 - some microseconds less, once a second
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_ino, found.st_dev, found.st_size
