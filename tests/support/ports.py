"""TCP ports of 127.0.0.1 for processes that a test starts."""

from __future__ import annotations

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """Return ``count`` different ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def free_port() -> int:
    """Return a port that nothing listens on now."""
    return free_ports(1)[0]
