"""The directory of public keys that may connect, read again while the exporter runs."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from sidestep.errors import ConfigError
from sidestep.transport.keys import PUBLIC, PublicKey, read_public

log = logging.getLogger(__name__)

INTERVAL = 1.0
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP})
"""The operator has taken it away. Anything else, such as too many open files, is trouble that a
stranger can cause, and must not cut off everybody else."""

Stamp = tuple[int, ...]


class AuthorizedKeys:
    """Keys of the ``NAME.pub`` files in a directory.

    Raises:
        ConfigError: The directory cannot be read now.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, tuple[Stamp, PublicKey | None]] = {}
        self._keys: dict[str, PublicKey] = {}
        self._read_at = float("-inf")
        self._complaint = ""
        try:
            self._look()
        except OSError as error:
            raise ConfigError(
                f"cannot read the directory of authorized keys {directory}: {error.strerror}"
            ) from None

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def engines(self, key: str) -> tuple[str, ...]:
        """Patterns of the engine ids that ``key`` may feed; empty: all."""
        found = self._keys.get(key)
        return found.engines if found is not None else ()

    def refresh(self, now: float) -> frozenset[str]:
        """Read what has changed, at most once a second.

        Returns:
            The keys that are authorized no more.
        """
        if now - self._read_at < INTERVAL:
            return frozenset()
        self._read_at = now
        before = self._keys
        try:
            self._look()
            self._complaint = ""
        except OSError as error:
            if error.errno in _GONE:
                self._files, self._keys = {}, {}
            self._complain(f"cannot read {self.directory}: {error.strerror}")
        for key in self._keys.keys() - before.keys():
            log.info("key %s is authorized", key)
        removed = frozenset(before.keys() - self._keys.keys())
        for key in removed:
            log.warning("key %s is authorized no more", key)
        return removed

    def _look(self) -> None:
        files: dict[Path, tuple[Stamp, PublicKey | None]] = {}
        for path in sorted(self.directory.iterdir()):
            if path.suffix != PUBLIC:
                continue
            known = self._files.get(path)
            try:
                status = path.stat()
            except OSError as error:
                if error.errno not in _GONE and known is not None:
                    files[path] = known
                continue
            stamp = (
                status.st_dev, status.st_ino, status.st_size,
                status.st_mtime_ns, status.st_ctime_ns,
            )  # fmt: skip
            files[path] = known if known and known[0] == stamp else (stamp, _read(path))
        self._files = files
        # Of two files with one key each may name engines: the later one wins, as a rule at all.
        self._keys = {key.text: key for _, key in files.values() if key is not None}

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:
            self._complaint = complaint
            log.error("%s; %d keys are authorized", complaint, len(self._keys))


def _read(path: Path) -> PublicKey | None:
    """The file's key; a file that is none is said aloud and lets nobody in."""
    try:
        return read_public(path)
    except ConfigError as error:
        log.warning("not authorized: %s", error)
        return None
