"""Names under which a browser may reach an exporter on loopback.

By DNS rebinding a web site has its own name resolve to 127.0.0.1, and reads from a server there what the
user's browser may read. The header ``Host`` then has the site's name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from aiohttp import web

ADVICE = (
    "use the exporter's address, localhost, or the name of this machine without a dot;"
    " --web.allowed-hosts permits other names"
)


def is_expected(request: web.Request, allowed: Collection[str]) -> bool:
    """Return whether a request has a host that no web site can have, or comes over a network.

    A web site's name has a dot. What a network's clients use as names cannot be known.

    Args:
        request: The request.
        allowed: Further names, in lower case.
    """
    host = _host(request.headers.get("Host", ""))
    if "." not in host or host.endswith(".localhost") or host in allowed or _is_address(host):
        return True
    assert request.transport is not None
    own = request.transport.get_extra_info("sockname")
    return not (isinstance(own, tuple) and _is_loopback(own[0]))


def _host(header: str) -> str:
    """Return the host of a header in lower case, without its port."""
    host = header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
