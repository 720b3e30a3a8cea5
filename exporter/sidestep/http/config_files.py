"""Files of the web configuration: bounded reads, and detection of changes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sidestep.errors import ConfigError

MAX_CONFIG_BYTES = 256 * 1024
MAX_PEM_BYTES = 1024 * 1024

FileIdentity = tuple[int, int, int, int] | None
"""Identifies a file's content by its stat; None if the file does not exist."""


class WatchedFiles:
    """Reads files and remembers their identity to detect changes.

    Attributes:
        seen: Identity of every requested file, whether it could be read or not.
    """

    def __init__(self) -> None:
        self.seen: dict[Path, FileIdentity] = {}

    def read(self, path: Path, limit: int) -> bytes:
        """Return the content of ``path``.

        Raises:
            ConfigError: The file cannot be read, is not regular, or has more than ``limit`` bytes.
        """
        # Before reading, so that a concurrent write counts as a change.
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
        """Return whether any of the files has changed; one stat each."""
        return any(file_identity(path) != known for path, known in self.seen.items())


def file_identity(path: Path) -> FileIdentity:
    """Return the identity of the content of ``path``; a renamed symlink changes it as well."""
    try:
        found = os.stat(path)  # noqa: PTH116 - saves some microseconds, once a second
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_ino, found.st_dev, found.st_size
