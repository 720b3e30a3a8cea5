"""``tls_server_config`` of the web configuration file, and the TLS context made from it.

Keys mean what they mean to exporter-toolkit; a value that Python's TLS does not support is an
error, never ignored silently.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import ssl
from collections.abc import Collection, Iterable, Iterator, Mapping
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
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
"""From the oldest to the newest."""


_VERIFY: Mapping[str, ssl.VerifyMode] = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
CLIENT_AUTH = (*_VERIFY,)
"""From the least to the strictest requirement."""
UNVERIFIED = {
    "RequestClientCert": "NoClientCert, which lets in the same clients,",
    "RequireAnyClientCert": "RequireAndVerifyClientCert with client_ca_file",
    "RequireClientCert": "RequireAndVerifyClientCert with client_ca_file",
}
"""Unsupported types: OpenSSL, through Python, requests a certificate only to verify it."""


def tls_config(section: TlsSection, source: Path, files: WatchedFiles) -> TlsConfig | None:
    """Check the section and read its files; None if nothing in it asks for TLS."""

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
            " every client with a certificate of theirs"
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


def make_context(config: TlsConfig) -> ssl.SSLContext:
    """Return a server's TLS context.

    Raises:
        ConfigError: A certificate, key or authority is invalid, they do not match, or this OpenSSL
            lacks a requested feature.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    # A client that supports HTTP/2 negotiates HTTP/1.1 here.
    context.set_alpn_protocols(["http/1.1"])
    _set_protocol_limits(context, config)
    _load_certificate(context, config.certificate, config.key)
    context.verify_mode = _VERIFY[config.client_auth]
    if config.client_ca is not None:
        _load_authority(context, config.client_ca)
    return context


def _set_protocol_limits(context: ssl.SSLContext, config: TlsConfig) -> None:
    """Set versions, ciphers and curve."""
    suites = [CIPHERS[name] for name in config.ciphers if CIPHERS[name]]
    lowest = config.min_version
    if config.ciphers and not suites:
        lowest = "TLS13"  # no cipher is left for earlier versions
    context.minimum_version = VERSIONS[lowest]
    context.maximum_version = VERSIONS[config.max_version]
    if suites:
        with contextlib.suppress(ssl.SSLError):  # none is known: the error below names each
            context.set_ciphers(":".join(suites))
    known = {cipher["name"] for cipher in context.get_ciphers()}
    for name in config.ciphers:
        if CIPHERS[name] and CIPHERS[name] not in known:
            raise ConfigError(f"cipher_suites: {name} is not in {ssl.OPENSSL_VERSION}")
    if config.curve:
        context.set_ecdh_curve(CURVES[config.curve])


def _load_certificate(context: ssl.SSLContext, certificate: Pem, key: Pem) -> None:
    def locked() -> str:
        # Without this OpenSSL would ask on the terminal.
        raise ConfigError(f"{key.source}: the key is encrypted; give one without a password")

    try:
        with _as_file(certificate) as certificate_file, _as_file(key) as key_file:
            context.load_cert_chain(certificate_file, key_file, locked)
    except (ssl.SSLError, ValueError) as error:
        why = {
            "KEY_VALUES_MISMATCH": "do not belong together",
            "KEY_TYPE_MISMATCH": "do not belong together",
            "EE_KEY_TOO_SMALL": "are too weak",
        }.get(getattr(error, "reason", None) or "", "are not a PEM certificate and its PEM key")
        raise ConfigError(f"{certificate.source} and {key.source} {why}") from None


def _load_authority(context: ssl.SSLContext, authority: Pem) -> None:
    # As in Go, each certificate of the file is trusted, also one that is not a root.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        with _as_file(authority) as file:
            context.load_verify_locations(cafile=file)
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"{authority.source} has no PEM certificate of an authority") from None


@contextlib.contextmanager
def _as_file(pem: Pem) -> Iterator[str]:
    """Yield a path of ``pem`` in memory: OpenSSL reads files, and no key goes to disk."""
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(pem.content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def subject_names(connection: ssl.SSLObject) -> frozenset[str]:
    """Return the subject alternative names of the verified client: DNS, IP, email and URI.

    An address has its canonical form, as Go writes it: ``2001:db8::1``.
    """
    # The declared type also covers other parts of a certificate.
    names: Iterable[tuple[str, object]] = (connection.getpeercert() or {}).get("subjectAltName", ())  # type: ignore[assignment]
    found = set()
    for kind, value in names:
        if kind == "IP Address":
            with contextlib.suppress(ValueError):  # its length is not that of an address
                found.add(str(ipaddress.ip_address(str(value).strip())))
        elif kind in ("DNS", "email", "URI"):
            found.add(str(value))
    return frozenset(found)
