"""TLS context made from the configuration, and the names of a client's certificate."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import ssl
import warnings
from collections.abc import Iterable, Iterator

from sidestep.errors import ConfigError
from sidestep.http.tls_config import CIPHERS, CURVES, VERSIONS, Pem, TlsConfig

_VERIFY = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_OLD_VERSIONS = {"TLS10", "TLS11"}
_OLD_CIPHERS = "ECDH+AESGCM:ECDH+CHACHA20:ECDH+AES:RSA+AES:!aNULL:!eNULL"


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
    with (
        _allow_old_versions()
        if {lowest, config.max_version} & _OLD_VERSIONS
        else contextlib.nullcontext()
    ):
        context.minimum_version = VERSIONS[lowest]
        context.maximum_version = VERSIONS[config.max_version]
    if lowest in _OLD_VERSIONS:
        # Above level 0 OpenSSL 3 rejects the signatures of these versions.
        context.set_ciphers(f"{':'.join(suites) or _OLD_CIPHERS}:@SECLEVEL=0")
    elif suites:
        with contextlib.suppress(ssl.SSLError):  # none is known: the error below names each
            context.set_ciphers(":".join(suites))
    known = {cipher["name"] for cipher in context.get_ciphers()}
    for name in config.ciphers:
        if CIPHERS[name] and CIPHERS[name] not in known:
            raise ConfigError(f"cipher_suites: {name} is not in {ssl.OPENSSL_VERSION}")
    if config.curve:
        context.set_ecdh_curve(CURVES[config.curve])


@contextlib.contextmanager
def _allow_old_versions() -> Iterator[None]:
    """Suppress the warning: a file with TLS10 or TLS11 asks for an old version on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


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
