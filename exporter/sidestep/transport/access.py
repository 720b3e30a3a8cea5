"""Access settings of the ingest endpoints, checked together."""

from __future__ import annotations

import dataclasses
import grp
import ipaddress
import logging
from pathlib import Path

from sidestep.errors import ConfigError
from sidestep.transport.addresses import TCP
from sidestep.transport.authorized import AuthorizedKeys
from sidestep.transport.keys import read_secret

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """Keys and groups that may connect.

    Attributes:
        secret: The exporter's own key: every ``tcp://`` endpoint then requires CURVE.
        keys: Public keys of engines; set if and only if ``secret`` is.
        plain_tcp: Whether ``tcp://`` may reach beyond this host without a key.
        group: Group that may enter the directory of an ``ipc://`` path; ``None``: this user only.
    """

    secret: bytes | None = None
    keys: AuthorizedKeys | None = None
    plain_tcp: bool = False
    group: int | None = None

    @classmethod
    def of(cls, curve_key: str, authorized: str, group: str, *, plain_tcp: bool) -> Access:
        """Return the access of these settings; an empty setting is not given.

        Raises:
            ConfigError: A setting is invalid, or requires another one that is missing.
        """
        if bool(curve_key) != bool(authorized):
            missing = "ingest.authorized-keys" if curve_key else "ingest.curve-key"
            # A key without authorized keys would encrypt, but let every peer connect.
            raise ConfigError(f"ingest.curve-key and ingest.authorized-keys: {missing} is missing")
        secret = read_secret(Path(curve_key)) if curve_key else None
        keys = AuthorizedKeys(Path(authorized)) if authorized else None
        if keys is not None and not keys:
            log.warning("no key in %s yet: no engine can connect over tcp", keys.directory)
        return cls(secret, keys, plain_tcp, _gid(group) if group else None)

    def check(self, endpoint: str) -> None:
        """Reject an unauthenticated endpoint that other hosts can reach.

        Raises:
            ConfigError: Other hosts can reach it, and neither a key nor ``plain_tcp`` is set.
        """
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

    Names other than localhost, including interface names and ``*``, count as reachable by other
    hosts: what they resolve to can change.
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
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"ingest.ipc-group {name!r}: no such group") from None
