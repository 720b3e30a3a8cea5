"""``tls_server_config`` of the web configuration file.

What the keys mean is the toolkit's; what Python's TLS cannot do is refused by name, never
dropped in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from sidestep.http.config_files import MAX_PEM_BYTES, Files
from sidestep.http.tls_names import CIPHERS, CURVES, VERSIONS
from sidestep.http.yaml_reader import Value


@dataclasses.dataclass(frozen=True, slots=True)
class Pem:
    """Certificates or a key, and where they came from."""

    content: bytes = dataclasses.field(repr=False)
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class TlsConfig:
    """``tls_server_config``.

    Attributes:
        allowed_sans: None where any verified client may come.
        ciphers: As Go names them; none for the default.
        curve: As Go names it; empty for the default.
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


KEYS = (
    "cert_file",
    "key_file",
    "cert",
    "key",
    "client_auth_type",
    "client_ca_file",
    "client_ca",
    "client_allowed_sans",
    "min_version",
    "max_version",
    "cipher_suites",
    "prefer_server_cipher_suites",
    "curve_preferences",
)
CLIENT_AUTH = ("NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert")
"""From the least to the most that is asked of a client."""
UNVERIFIED = {
    "RequestClientCert": "NoClientCert, which lets in the same clients,",
    "RequireAnyClientCert": "RequireAndVerifyClientCert with client_ca_file",
    "RequireClientCert": "RequireAndVerifyClientCert with client_ca_file",
}
"""What cannot be had: OpenSSL, through Python, asks for a certificate only to verify it."""


def tls_config(section: Value, directory: Path, files: Files) -> TlsConfig | None:
    """The section; None where it has nothing that asks for TLS, as in the toolkit.

    Raises:
        ConfigError: One line with the file, the line and the key.
    """
    found = section.fields(KEYS)
    nothing = Value(None, section.source)

    def value(key: str) -> Value:
        return found.get(key, nothing)

    def pem(key: str) -> Pem | None:
        """A file wins over what stands inline."""
        if name := value(f"{key}_file").text():
            path = directory / name
            return Pem(files.read(path, MAX_PEM_BYTES), str(path))
        inline = value(key).text()
        return Pem(inline.encode(), f"{section.source}: {value(key).path}") if inline else None

    certificate, key, client_ca = pem("cert"), pem("key"), pem("client_ca")
    value("prefer_server_cipher_suites").boolean(default=True)  # Go ignores it since 1.17
    lowest, highest = _versions(value("min_version"), value("max_version"))
    ciphers = _ciphers(value("cipher_suites"), highest)
    curve = _curve(value("curve_preferences"))
    auth, sans = _client_auth(found, nothing, client_ca)
    asked = value("client_auth_type").text()
    if certificate is None and key is None and client_ca is None and not asked:
        return None
    if certificate is None or key is None:
        missing = "cert_file" if certificate is None else "key_file"
        raise section.refused(f"has no {missing}; name the PEM file, or put it in {missing[:-5]}")
    return TlsConfig(
        certificate, key, auth, client_ca, sans, lowest, highest, ciphers, curve
    )  # fmt: skip


def _client_auth(
    found: Mapping[str, Value], nothing: Value, client_ca: Pem | None
) -> tuple[str, frozenset[str] | None]:
    """Who of the clients must show what; never less than the file seems to say."""
    given = found.get("client_auth_type", nothing)
    auth = given.text() or CLIENT_AUTH[0]
    if auth in UNVERIFIED:
        raise given.refused(f"{auth} is not offered: it verifies nothing; use {UNVERIFIED[auth]}")
    if auth not in CLIENT_AUTH:
        raise given.refused(f"{auth!r} must be one of {', '.join(CLIENT_AUTH)}")
    if client_ca is not None and auth == CLIENT_AUTH[0]:
        which = found.get("client_ca_file") or found["client_ca"]
        raise which.refused("needs client_auth_type RequireAndVerifyClientCert to have any effect")
    if client_ca is None and auth != CLIENT_AUTH[0]:
        raise given.refused(
            f"{auth} needs client_ca_file: the system's authorities would let in"
            " whoever has a certificate of theirs"
        )
    sans = found.get("client_allowed_sans", nothing)
    names = sans.elements()
    if names is None:
        return auth, None
    if auth != CLIENT_AUTH[-1]:
        raise sans.refused("needs client_auth_type RequireAndVerifyClientCert")
    return auth, frozenset(name.text() for name in names)


def _versions(least: Value, most: Value) -> tuple[str, str]:
    for value in (least, most):
        if value.text() not in ("", *VERSIONS):
            raise value.refused(f"{value.text()!r} must be one of {', '.join(VERSIONS)}")
    lowest, highest = least.text() or "TLS12", most.text() or "TLS13"
    if lowest > highest:
        raise (most if least.empty else least).refused("leaves no version: min is above max")
    return lowest, highest


def _ciphers(value: Value, highest: str) -> tuple[str, ...]:
    names = value.elements() or ()
    for name in names:
        if name.text() not in CIPHERS:
            raise name.refused(f"{name.text()!r} is no secure cipher suite by Go's name")
    found = tuple(name.text() for name in names)
    if found and highest != "TLS13" and not any(CIPHERS[name] for name in found):
        raise value.refused(f"has none for {highest}, which is max_version")
    return found


def _curve(value: Value) -> str:
    names = value.elements() or ()
    for name in names:
        if name.text() not in CURVES:
            raise name.refused(f"{name.text()!r} must be one of {', '.join(CURVES)}")
    if len(names) > 1:
        raise value.refused("can be one curve here, not a list of several; or leave it out")
    return names[0].text() if names else ""
