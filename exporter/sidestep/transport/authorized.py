"""The directory of authorized public keys, reloaded while the exporter runs."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from sidestep.errors import ConfigError
from sidestep.transport.keys import PUBLIC, PublicKey, read_public

log = logging.getLogger(__name__)

INTERVAL = 1.0
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP})
"""Errors that mean the operator removed the file or its permission. Others, such as too many open
files, can be caused by an untrusted peer and must not revoke keys."""

Stamp = tuple[int, ...]


class AuthorizedKeys:
    """Public keys of the ``NAME.pub`` files in a directory.

    Raises:
        ConfigError: The directory cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, tuple[Stamp, PublicKey | None]] = {}
        self._keys: dict[str, PublicKey] = {}
        self._read_at = float("-inf")
        self._last_error = ""
        try:
            self._load()
        except OSError as error:
            raise ConfigError(
                f"cannot read the directory of authorized keys {directory}: {error.strerror}"
            ) from None

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def engines(self, key: str) -> tuple[str, ...]:
        """Return patterns of the engine ids that ``key`` may feed; empty: all."""
        found = self._keys.get(key)
        return found.engines if found is not None else ()

    def refresh(self, now: float) -> frozenset[str]:
        """Reload changed files, at most once a second.

        Returns:
            Keys that are no longer authorized.
        """
        if now - self._read_at < INTERVAL:
            return frozenset()
        self._read_at = now
        before = self._keys
        try:
            self._load()
            self._last_error = ""
        except OSError as error:
            if error.errno in _GONE:
                self._files, self._keys = {}, {}
            self._log_error(f"cannot read {self.directory}: {error.strerror}")
        for key in self._keys.keys() - before.keys():
            log.info("key %s is authorized", key)
        removed = frozenset(before.keys() - self._keys.keys())
        for key in removed:
            log.warning("key %s is no longer authorized", key)
        return removed

    def _load(self) -> None:
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
        # Two files with one key may name different engines: the last file wins.
        self._keys = {key.text: key for _, key in files.values() if key is not None}

    def _log_error(self, error: str) -> None:
        if error != self._last_error:
            self._last_error = error
            log.error("%s; %d keys are authorized", error, len(self._keys))


def _read(path: Path) -> PublicKey | None:
    """Return the key of a file; log a file without a valid key, and return None."""
    try:
        return read_public(path)
    except ConfigError as error:
        log.warning("not authorized: %s", error)
        return None
