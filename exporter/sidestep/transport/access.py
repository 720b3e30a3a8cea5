"""Who may connect over what: the settings of the ingest's endpoints, checked together."""

from __future__ import annotations

import dataclasses
import grp
import ipaddress
import logging
from pathlib import Path

from sidestep.errors import ConfigError
from sidestep.transport.authorized import AuthorizedKeys
from sidestep.transport.keys import read_secret
from sidestep.transport.reach import TCP

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """What a peer needs.

    Attributes:
        secret: The exporter's own key: every ``tcp://`` endpoint then requires CURVE.
        keys: Those of engines; with ``secret``, and only then.
        plain_tcp: Let ``tcp://`` reach beyond this host without any key.
        group: Group that may enter the directory of an ``ipc://`` path; ``None``: nobody else.
    """

    secret: bytes | None = None
    keys: AuthorizedKeys | None = None
    plain_tcp: bool = False
    group: int | None = None

    @classmethod
    def of(cls, curve_key: str, authorized: str, group: str, *, plain_tcp: bool) -> Access:
        """From settings, each empty where it is not given.

        Raises:
            ConfigError: One of them is wrong, or goes with another that is missing.
        """
        if bool(curve_key) != bool(authorized):
            missing = "ingest.authorized-keys" if curve_key else "ingest.curve-key"
            # One key alone would encrypt, and let everybody in.
            raise ConfigError(f"ingest.curve-key and ingest.authorized-keys: {missing} is missing")
        secret = read_secret(Path(curve_key)) if curve_key else None
        keys = AuthorizedKeys(Path(authorized)) if authorized else None
        if keys is not None and not keys:
            log.warning("no key in %s yet: no engine is let in over tcp", keys.directory)
        return cls(secret, keys, plain_tcp, _gid(group) if group else None)

    def check(self, endpoint: str) -> None:
        """Refuse an endpoint that would let in whom nobody named.

        Raises:
            ConfigError: It reaches beyond this host, and neither a key nor a word allows it.
        """
        if self.is_open(endpoint) and not self.plain_tcp:
            raise ConfigError(
                f"ingest endpoint {endpoint} reaches beyond this host, and anyone there could send"
                " metrics: give --ingest.curve-key and --ingest.authorized-keys (see sidestep"
                " keygen --help), or --ingest.allow-plain-tcp where the network itself is closed"
            )

    def is_open(self, endpoint: str) -> bool:
        """Whether anyone who can reach ``endpoint`` from beyond this host may send to it."""
        return endpoint.startswith(TCP) and self.secret is None and not is_loopback(endpoint)


def is_loopback(endpoint: str) -> bool:
    """Whether only this host can reach a ``tcp://`` endpoint.

    A name other than localhost, an interface's or ``*`` included, counts as beyond: what
    it stands for is decided elsewhere, and may change.
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
        raise ConfigError(f"ingest.ipc-group {name!r}: there is no such group") from None
