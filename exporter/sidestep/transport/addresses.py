"""Addresses of endpoints."""

from __future__ import annotations

IPC, TCP = "ipc://", "tcp://"


def host_and_port(endpoint: str) -> tuple[str, str]:
    """Return host and port; a source address before a semicolon is dropped."""
    host, _, port = endpoint.removeprefix(TCP).rpartition(";")[2].rpartition(":")
    return host.strip("[]"), port
