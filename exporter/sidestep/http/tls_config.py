"""``tls_server_config`` of the web configuration file.

Keys mean what they mean to exporter-toolkit; a value that Python's TLS does not support is an
error, never ignored silently.
"""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from sidestep.errors import ConfigError
from sidestep.http.config_files import MAX_PEM_BYTES, WatchedFiles


@dataclasses.dataclass(frozen=True, slots=True)
class Pem:
    """Certificates or a key, and their source."""

    content: bytes = dataclasses.field(repr=False)
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class TlsConfig:
    """The checked ``tls_server_config``.

    Attributes:
        allowed_sans: None if any verified client may connect.
        ciphers: Go's names; empty for the default.
        curve: Go's name; empty for the default.
    """

    certificate: Pem
    key: Pem
    client_auth: str
    client_ca: Pem | None
    allowed_sans: frozenset[str] | None
    min_version: str
    max_version: str
    ciphers: tuple[str, ...]
    curve: str


class TlsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``tls_server_config`` as in the file."""

    cert_file: str | None = None
    key_file: str | None = None
    cert: str | None = None
    key: str | None = None
    client_auth_type: str | None = None
    client_ca_file: str | None = None
    client_ca: str | None = None
    client_allowed_sans: tuple[str, ...] | None = None
    min_version: str | None = None
    max_version: str | None = None
    cipher_suites: tuple[str, ...] | None = None
    prefer_server_cipher_suites: bool | None = None
    """No effect: Go ignores it since 1.17."""
    curve_preferences: tuple[str, ...] | None = None


CIPHERS: Mapping[str, str] = {
    "TLS_AES_128_GCM_SHA256": "",
    "TLS_AES_256_GCM_SHA384": "",
    "TLS_CHACHA20_POLY1305_SHA256": "",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    # Secure to Go until 1.21, insecure since; old files may name them.
    "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
}
"""Go's secure suites; those of TLS 1.3 are always on, in Go and here, and have no OpenSSL name."""

CURVES: Mapping[str, str] = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}

VERSIONS: Mapping[str, ssl.TLSVersion] = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
"""From the oldest to the newest."""


CLIENT_AUTH = ("NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert")
"""From the least to the strictest requirement."""
UNVERIFIED = {
    "RequestClientCert": "NoClientCert, which lets in the same clients,",
    "RequireAnyClientCert": "RequireAndVerifyClientCert with client_ca_file",
    "RequireClientCert": "RequireAndVerifyClientCert with client_ca_file",
}
"""Unsupported types: OpenSSL, through Python, requests a certificate only to verify it."""


def tls_config(section: TlsSection, source: Path, files: WatchedFiles) -> TlsConfig | None:
    """Check the section and read its files; None if nothing in it asks for TLS.

    Raises:
        ConfigError: One line with the key.
    """

    def pem(key: str, name: str | None, inline: str | None) -> Pem | None:
        """Read a PEM file; a file takes precedence over an inline value."""
        if name:
            path = source.parent / name
            return Pem(files.read(path, MAX_PEM_BYTES), str(path))
        return Pem(inline.encode(), f"{source}: tls_server_config.{key}") if inline else None

    certificate = pem("cert", section.cert_file, section.cert)
    key = pem("key", section.key_file, section.key)
    client_ca = pem("client_ca", section.client_ca_file, section.client_ca)
    lowest, highest = _versions(section.min_version, section.max_version)
    ciphers = _ciphers(section.cipher_suites or (), highest)
    curve = _curve(section.curve_preferences or ())
    auth, sans = _client_auth(section, client_ca)
    if certificate is None and key is None and client_ca is None and not section.client_auth_type:
        return None
    if certificate is None or key is None:
        missing = "cert_file" if certificate is None else "key_file"
        raise ConfigError(
            f"tls_server_config has no {missing}; name the PEM file, or put it in {missing[:-5]}"
        )
    return TlsConfig(
        certificate, key, auth, client_ca, sans, lowest, highest, ciphers, curve
    )  # fmt: skip


def _client_auth(section: TlsSection, client_ca: Pem | None) -> tuple[str, frozenset[str] | None]:
    """Return the requirements on clients; never less than the file seems to demand."""
    auth = section.client_auth_type or CLIENT_AUTH[0]
    if auth in UNVERIFIED:
        raise _refused(
            f"client_auth_type {auth} is not supported: it verifies nothing; use {UNVERIFIED[auth]}"
        )
    _one_of("client_auth_type", auth, CLIENT_AUTH)
    if client_ca is not None and auth == CLIENT_AUTH[0]:
        which = "client_ca_file" if section.client_ca_file else "client_ca"
        raise _refused(
            f"{which} needs client_auth_type RequireAndVerifyClientCert to have any effect"
        )
    if client_ca is None and auth != CLIENT_AUTH[0]:
        raise _refused(
            f"client_auth_type {auth} needs client_ca_file: the system's authorities would let in"
            " whoever has a certificate of theirs"
        )
    if section.client_allowed_sans is None:
        return auth, None
    if auth != CLIENT_AUTH[-1]:
        raise _refused("client_allowed_sans needs client_auth_type RequireAndVerifyClientCert")
    return auth, frozenset(section.client_allowed_sans)


def _versions(least: str | None, most: str | None) -> tuple[str, str]:
    lowest, highest = least or "TLS12", most or "TLS13"
    _one_of("min_version", lowest, VERSIONS)
    _one_of("max_version", highest, VERSIONS)
    if lowest > highest:
        raise _refused(f"{'min' if least else 'max'}_version leaves no version: min is above max")
    return lowest, highest


def _ciphers(names: tuple[str, ...], highest: str) -> tuple[str, ...]:
    for name in names:
        if name not in CIPHERS:
            raise _refused(f"cipher_suites {name!r} is no secure cipher suite by Go's name")
    if names and highest != "TLS13" and not any(CIPHERS[name] for name in names):
        raise _refused(f"cipher_suites has none for {highest}, which is max_version")
    return names


def _curve(names: tuple[str, ...]) -> str:
    for name in names:
        _one_of("curve_preferences", name, CURVES)
    if len(names) > 1:
        raise _refused("curve_preferences can be one curve here, not several; or leave it out")
    return names[0] if names else ""


def _one_of(key: str, given: str, known: Collection[str]) -> None:
    if given not in known:
        raise _refused(f"{key} {given!r} must be one of {', '.join(known)}")


def _refused(why: str) -> ConfigError:
    return ConfigError(f"tls_server_config.{why}")
