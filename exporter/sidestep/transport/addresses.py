"""Comparison of the addresses of endpoints: does a connection to one reach the socket bound to another?"""

from __future__ import annotations

import os
import socket

IPC, TCP = "ipc://", "tcp://"
ANYWHERE = {"*", "0.0.0.0", "::"}  # noqa: S104 - compared, not bound
"""Host names that mean all addresses of this host."""


def is_reached(endpoint: str, bound: str) -> bool:
    """Return whether a connection to ``endpoint`` reaches ``bound``, bound on this host.

    Host names are resolved if the ports are equal. A name that does not resolve is not reached.
    """
    if endpoint.startswith(IPC) and bound.startswith(IPC):
        one, other = (os.path.realpath(each.removeprefix(IPC)) for each in (endpoint, bound))
        return one == other
    if not (endpoint.startswith(TCP) and bound.startswith(TCP)):
        return False
    (host, port), (own, own_port) = host_and_port(endpoint), host_and_port(bound)
    if port != own_port or not port.isdecimal():
        return False
    addresses = _addresses(host)
    if own in ANYWHERE:
        return any(map(_is_ours, addresses))
    return not addresses.isdisjoint(_addresses(own))


def host_and_port(endpoint: str) -> tuple[str, str]:
    """Return host and port; a source address before a semicolon is dropped."""
    host, _, port = endpoint.removeprefix(TCP).rpartition(";")[2].rpartition(":")
    return host.strip("[]"), port


def is_host(text: str) -> bool:
    """Return whether ``text`` can be looked up as a host's name: its labels are neither empty nor too long."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return bool(text) and "\0" not in text


def checked_endpoint(endpoint: str) -> str:
    """Return ``endpoint`` if its host can be looked up, or it has none.

    Raises:
        ValueError: It cannot; completes an error line.
    """
    host = host_and_port(endpoint)[0] if endpoint.startswith(TCP) else ""
    if host and not is_host(host):
        raise ValueError(f"{host!r} is no name or address of a host")
    return endpoint


def _addresses(host: str) -> set[str]:
    if host in ANYWHERE:
        return {"127.0.0.1", "::1"}
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return set()
    return {str(address[0]) for *_, address in found}


def _is_ours(address: str) -> bool:
    """Return whether ``address`` belongs to this host: only then can it be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
