"""Addresses of endpoints."""

from __future__ import annotations

IPC, TCP = "ipc://", "tcp://"


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
    if endpoint.startswith(IPC) and endpoint.removeprefix(IPC)[:1] in ("", "@", "*"):
        # An abstract name has no file mode: every user of the host may connect.
        raise ValueError("must be the path of a file")


def checked_endpoint(endpoint: str) -> str:
    """Return ``endpoint`` after checking the name of its host, and that it is UTF-8, as ZeroMQ's are."""
    endpoint.encode()
    host = host_and_port(endpoint)[0] if endpoint.startswith(TCP) else ""
    if host and not is_host(host):
        raise ValueError(f"{host!r} is no name or address of a host")
    return endpoint
