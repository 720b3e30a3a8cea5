"""Addresses of endpoints."""

from __future__ import annotations

import os

IPC, TCP = "ipc://", "tcp://"
IPC_PATH_CHARS = 107
"""Maximum length of a Unix socket's path, without the trailing NUL."""
MAX_PORT = 65535


def host_and_port(endpoint: str) -> tuple[str, str]:
    """Return host and port of the target, without a source address before a semicolon."""
    host, _, port = endpoint.removeprefix(TCP).rpartition(";")[2].rpartition(":")
    return host.strip("[]"), port


def is_host(text: str) -> bool:
    """Return whether ``text`` can be a host's name: no label of it is empty or too long."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return bool(text) and "\0" not in text


def check_bindable(endpoint: str) -> None:
    """Raise a ValueError if no exporter may listen on ``endpoint``."""
    if not endpoint.startswith((IPC, TCP)):
        raise ValueError("must begin with ipc:// or tcp://")
    path = endpoint.removeprefix(IPC)
    if endpoint.startswith(TCP):
        port = host_and_port(endpoint)[1]
        # ZeroMQ takes any number, and binds what remains of it.
        if port != "*" and not (port.isdecimal() and int(port) <= MAX_PORT):
            raise ValueError(f"must be tcp://HOST:PORT, with a port up to {MAX_PORT}")
    elif path[:1] in ("", "@", "*"):
        # An abstract name has no file mode: every user of the host may connect.
        raise ValueError("must be the path of a file")
    elif len(os.fsencode(path)) > IPC_PATH_CHARS:
        raise ValueError(f"the path is longer than {IPC_PATH_CHARS} bytes")


def checked_endpoint(endpoint: str) -> str:
    """Return ``endpoint`` after checking the name of its host, and that it is UTF-8, as ZeroMQ's are."""
    endpoint.encode()
    host = host_and_port(endpoint)[0] if endpoint.startswith(TCP) else ""
    if host and not is_host(host):
        raise ValueError(f"{host!r} is no name or address of a host")
    return endpoint
