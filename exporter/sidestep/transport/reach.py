"""Whether two endpoints are one place: who connects to the one reaches who is bound to the other."""

from __future__ import annotations

import os
import socket

IPC, TCP = "ipc://", "tcp://"
ANYWHERE = {"*", "0.0.0.0", "::"}  # noqa: S104 - what a user may have written
"""Hosts that stand for all addresses of this one; to connect to them is to connect to it."""


def is_reached(endpoint: str, bound: str) -> bool:
    """Whether a connection to ``endpoint`` arrives where ``bound`` is bound on this host.

    Names are looked up, if the ports are the same. What cannot be found out is another place.
    """
    if endpoint.startswith(IPC) and bound.startswith(IPC):
        one, other = (os.path.realpath(each.removeprefix(IPC)) for each in (endpoint, bound))
        return one == other
    if not (endpoint.startswith(TCP) and bound.startswith(TCP)):
        return False
    (host, port), (own, own_port) = _place(endpoint), _place(bound)
    if port != own_port or not port.isdecimal():
        return False
    addresses = _addresses(host)
    if own in ANYWHERE:
        return any(map(_is_ours, addresses))
    return not addresses.isdisjoint(_addresses(own))


def _place(endpoint: str) -> tuple[str, str]:
    """Host and port; who connects may have written his own address before a semicolon."""
    host, _, port = endpoint.removeprefix(TCP).rpartition(";")[2].rpartition(":")
    return host.strip("[]"), port


def _addresses(host: str) -> set[str]:
    if host in ANYWHERE:
        return {"127.0.0.1", "::1"}
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return set()
    return {str(place[0]) for *_, place in found}


def _is_ours(address: str) -> bool:
    """Whether it is one of this host's: nobody can bind another's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
