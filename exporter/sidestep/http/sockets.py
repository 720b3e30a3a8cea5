"""Listening sockets of the HTTP server."""

from __future__ import annotations

import errno
import socket

from sidestep.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; an empty host is all addresses.

    Raises:
        ConfigError: The address is in use, not local, or unknown.
    """
    shown = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # One socket for all addresses of both families if the host has IPv6.
        found.sort(key=lambda entry: entry[0] == socket.AF_INET6, reverse=not host)
        family, _, _, _, address = found[0]
        dual = family == socket.AF_INET6 and not host
        return socket.create_server(
            address[:2], family=family, backlog=128, dualstack_ipv6=dual and socket.has_ipv6
        )
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} is in use at {host or 'all addresses'}: choose another with"
                " --web.listen-address"
            ) from None
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {shown}: {reason}") from None
