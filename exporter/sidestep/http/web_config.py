"""The web configuration file: exporter-toolkit's keys, checked, with the files that it names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from sidestep.errors import ConfigError
from sidestep.http.config_files import MAX_CONFIG_BYTES, Files
from sidestep.http.tls_config import TlsConfig, tls_config
from sidestep.http.yaml_reader import Value, parse

MAX_COST = 18
"""Of a bcrypt hash: 16 s of a core here. A cost of 31 would take a day, and cannot be stopped."""
SECTIONS = ("tls_server_config", "http_server_config", "basic_auth_users", "rate_limit")
HEADERS: Mapping[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Strict-Transport-Security": (),
}
"""Headers that may be set, with the values of those that have few."""
_BCRYPT = re.compile(r"\$2[abxy]\$(\d\d)\$[./A-Za-z0-9]{53}")


@dataclasses.dataclass(frozen=True, slots=True)
class RateLimit:
    """``rate_limit``: a token every ``interval`` seconds, ``burst`` of them at most."""

    interval: float
    burst: int


@dataclasses.dataclass(frozen=True, slots=True)
class WebConfig:
    """The whole file; as it stands here, of no file: nobody is asked for anything."""

    tls: TlsConfig | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    users: Mapping[bytes, bytes] = dataclasses.field(default_factory=dict, repr=False)
    rate_limit: RateLimit | None = None


def load(path: Path, files: Files) -> WebConfig:
    """What the file says; relative paths in it are relative to its directory.

    Raises:
        ConfigError: One line with the file, the line and the key.
    """
    try:
        text = files.read(path, MAX_CONFIG_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not YAML: it is not UTF-8") from None
    sections = parse(text, str(path)).fields(SECTIONS)
    nothing = Value(None, str(path))
    http = sections.get("http_server_config", nothing).fields(("http2", "headers"))
    # HTTP/1.1 is all we speak; a client that would like HTTP/2 learns so in the handshake.
    http.get("http2", nothing).boolean(default=True)
    return WebConfig(
        tls=tls_config(sections.get("tls_server_config", nothing), path.parent, files),
        headers=dict(map(_header, http.get("headers", nothing).fields(tuple(HEADERS)).items())),
        users=dict(map(_user, sections.get("basic_auth_users", nothing).items())),
        rate_limit=_rate_limit(sections.get("rate_limit", nothing)),
    )


def _header(item: tuple[str, Value]) -> tuple[str, str]:
    name, value = item
    text, choices = value.text(), HEADERS[name]
    if text and choices and text not in choices:
        raise value.refused(f"must be {' or '.join(choices)}")
    if not text.isprintable() or not text.isascii():
        raise value.refused("must be one line of plain characters")
    return name, text


def _user(item: tuple[str, Value]) -> tuple[bytes, bytes]:
    name, value = item
    hashed = value.text()
    found = _BCRYPT.fullmatch(hashed)
    if not found or int(found[1]) < 4:  # noqa: PLR2004 - bcrypt's own least
        raise value.refused("is not a bcrypt hash; make one with sidestep hash-password")
    if int(found[1]) > MAX_COST:
        raise value.refused(f"has a cost of {found[1]}, {MAX_COST} at most; 10 is usual")
    return name.encode(), hashed.encode()


def _rate_limit(section: Value) -> RateLimit | None:
    found = section.fields(("interval", "burst"))
    nothing = Value(None, section.source)
    interval = found.get("interval", nothing).seconds()
    burst = found.get("burst", nothing).number()
    if not interval:
        return None
    if not burst:
        raise section.refused("needs a burst of at least 1: with 0 no request gets through")
    return RateLimit(interval, burst)
