"""Access to the ingest endpoints: the keys and groups that may connect."""

from __future__ import annotations

import dataclasses
import errno
import grp
import ipaddress
import logging
from pathlib import Path

from sidestep.errors import ConfigError
from sidestep.transport.addresses import TCP
from sidestep.transport.keys import PUBLIC, PublicKey, read_public, read_secret

INTERVAL = 1.0
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP})
"""Errors of a file that the operator has removed or protected. A peer can cause other errors, such as
too many open files, so those must not revoke keys."""

_NO_GROUP = (1 << 32) - 1
"""For the kernel, this number and larger ones are no group."""

Stamp = tuple[int, ...]


class AuthorizedKeys:
    """The public keys in a directory of ``NAME.pub`` files, reloaded while the exporter runs."""

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
        """Reload changed files, at most once a second; return keys that are no longer authorized."""
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
    """Return the key of a file, or log why it has none and return None."""
    try:
        return read_public(path)
    except ConfigError as error:
        log.warning("not authorized: %s", error)
        return None


log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """Keys and groups that may connect.

    Attributes:
        secret: The exporter's own key. With it, every ``tcp://`` endpoint requires CURVE.
        keys: Public keys of engines; set if and only if ``secret`` is.
        plain_tcp: Whether other hosts may connect to ``tcp://`` endpoints without a key.
        group: Group that may enter the directory of an ``ipc://`` path; ``None``: this user only.
    """

    secret: bytes | None = None
    keys: AuthorizedKeys | None = None
    plain_tcp: bool = False
    group: int | None = None

    @classmethod
    def of(cls, curve_key: str, authorized: str, group: str, *, plain_tcp: bool) -> Access:
        """Return the access of these settings; an empty text is an unset one.

        Raises:
            ConfigError: A setting is invalid, or requires another one that is missing.
        """
        if bool(curve_key) != bool(authorized):
            missing = "ingest.authorized-keys" if curve_key else "ingest.curve-key"
            # A secret key alone would encrypt, but let every peer connect.
            raise ConfigError(f"ingest.curve-key and ingest.authorized-keys: {missing} is missing")
        secret = read_secret(Path(curve_key)) if curve_key else None
        keys = AuthorizedKeys(Path(authorized)) if authorized else None
        if keys is not None and not keys:
            log.warning("no key in %s yet: no engine can connect over tcp", keys.directory)
        return cls(secret, keys, plain_tcp, _gid(group) if group else None)

    def check(self, endpoint: str) -> None:
        """Reject an unauthenticated endpoint that other hosts can reach."""
        if self.is_open(endpoint) and not self.plain_tcp:
            raise ConfigError(
                f"ingest endpoint {endpoint} reaches beyond this host, and anyone there could send"
                " metrics: give --ingest.curve-key and --ingest.authorized-keys (see sidestep"
                " keygen --help), or --ingest.allow-plain-tcp where the network itself is closed"
            )

    def is_open(self, endpoint: str) -> bool:
        """Return whether other hosts can send to ``endpoint`` without a key."""
        return endpoint.startswith(TCP) and self.secret is None and not is_loopback(endpoint)


def is_loopback(endpoint: str) -> bool:
    """Return whether only this host can reach a ``tcp://`` endpoint.

    Other hosts may reach any name but localhost, since what a name or an interface stands for changes.
    """
    host = endpoint.removeprefix(TCP).rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _gid(name: str) -> int:
    try:
        if name.isdecimal() and int(name) < _NO_GROUP:
            return int(name)
        return grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):  # ValueError: thousands of digits
        raise ConfigError(f"ingest.ipc-group {name!r}: no such group") from None
