"""The web configuration file: exporter-toolkit's keys, checked, and the files that it names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sidestep.config.yaml_reader import read
from sidestep.errors import ConfigError
from sidestep.http.config_files import MAX_CONFIG_BYTES, WatchedFiles
from sidestep.http.tls import TlsConfig, TlsSection, tls_config

MAX_COST = 18
"""Highest cost of a bcrypt hash: 16 s of a core; 31 would take a day, and cannot be stopped."""
_BCRYPT = re.compile(r"\$2[abxy]\$(\d\d)\$[./A-Za-z0-9]{53}")
_NUMBER = re.compile(r"\+?[0-9]{1,9}")
_DURATION = re.compile(r"\+?(?:[0-9]{1,15}(?:\.[0-9]{0,15})?(?:ms|s|m|h))+")
_PART = re.compile(r"([0-9.]+)([a-z]+)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
HEADERS: Mapping[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Strict-Transport-Security": (),
}
"""Headers that may be set, and their values if only few are valid."""


class HttpSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``http_server_config``; ``http2`` has no effect: the exporter supports HTTP/1.1 only."""

    http2: bool | None = None
    headers: dict[str, str | None] | None = None


class RateLimitSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``rate_limit``."""

    interval: str | None = None
    burst: str | None = None


class WebFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file, key by key; a key without a value counts as absent."""

    tls_server_config: TlsSection | None = None
    http_server_config: HttpSection | None = None
    basic_auth_users: dict[str, str | None] | None = None
    rate_limit: RateLimitSection | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RateLimit:
    """``rate_limit``: a token every ``interval`` seconds, at most ``burst`` tokens."""

    interval: float
    burst: int


@dataclasses.dataclass(frozen=True, slots=True)
class WebConfig:
    """The checked configuration; the defaults are those of no file, which admit every client."""

    tls: TlsConfig | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    users: Mapping[bytes, bytes] = dataclasses.field(default_factory=dict, repr=False)
    rate_limit: RateLimit | None = None


def load(path: Path, files: WatchedFiles) -> WebConfig:
    """Read and check the file; relative paths in it are relative to its directory."""
    content = files.read(path, MAX_CONFIG_BYTES)
    try:
        return _checked(read(content.decode("utf-8-sig"), WebFile), path, files)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not YAML: it is not UTF-8") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None


def _checked(file: WebFile, path: Path, files: WatchedFiles) -> WebConfig:
    http = file.http_server_config or HttpSection()
    return WebConfig(
        tls=tls_config(file.tls_server_config or TlsSection(), path, files),
        headers=dict(map(_header, (http.headers or {}).items())),
        users=dict(map(_user, (file.basic_auth_users or {}).items())),
        rate_limit=_rate_limit(file.rate_limit or RateLimitSection()),
    )


def _header(item: tuple[str, str | None]) -> tuple[str, str]:
    name, value = item[0], item[1] or ""
    if name not in HEADERS:
        raise ConfigError(f"http_server_config.headers.{name} must be one of {', '.join(HEADERS)}")
    choices = HEADERS[name]
    if value and choices and value not in choices:
        raise ConfigError(f"http_server_config.headers.{name} must be {' or '.join(choices)}")
    if not value.isprintable() or not value.isascii():
        raise ConfigError(f"http_server_config.headers.{name} must be one line of plain characters")
    return name, value


def _user(item: tuple[str, str | None]) -> tuple[bytes, bytes]:
    name, hashed = item[0], item[1] or ""
    found = _BCRYPT.fullmatch(hashed)
    if not found or int(found[1]) < 4:  # noqa: PLR2004 - bcrypt's own least
        raise ConfigError(
            f"basic_auth_users.{name} is not a bcrypt hash; make one with sidestep hash-password"
        )
    if int(found[1]) > MAX_COST:
        raise ConfigError(
            f"basic_auth_users.{name} has a cost of {found[1]}, {MAX_COST} at most; 10 is usual"
        )
    return name.encode(), hashed.encode()


def _rate_limit(section: RateLimitSection) -> RateLimit | None:
    interval, burst = _seconds(section.interval or "0"), section.burst or "0"
    if not _NUMBER.fullmatch(burst):
        raise ConfigError("rate_limit.burst must be a whole number")
    if not interval:
        return None
    if not int(burst):
        raise ConfigError("rate_limit needs a burst of at least 1: with 0 no request gets through")
    return RateLimit(interval, int(burst))


def _seconds(given: str) -> float:
    """Parse a duration as Go writes it, ``1m30s``.

    A number without a unit is an error: to Go it means nanoseconds, a likely mistake.
    """
    if given == "0":
        return 0.0
    if not _DURATION.fullmatch(given):
        raise ConfigError(
            "rate_limit.interval must be a duration with its unit, as 500ms, 1s or 1m30s"
        )
    return sum(float(part) * _UNITS[unit] for part, unit in _PART.findall(given))
