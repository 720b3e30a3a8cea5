"""Access of the commands to web servers: headers, login and certificates."""

from __future__ import annotations

import base64
import os
import ssl
from typing import NamedTuple

import aiohttp
import click
from yarl import URL

from sidestep.errors import ConfigError
from sidestep.transport.http_response import BoundedResponse
from sidestep_tools.web_client.fetch import FetchError

PASSWORD = "SIDESTEP_PASSWORD"  # noqa: S105 - the name of a variable


class Access(NamedTuple):
    """Headers, login and certificates of all requests; names as curl has them."""

    user: str = ""
    header: tuple[str, ...] = ()
    cacert: str = ""
    cert: str = ""
    key: str = ""
    insecure: bool = False

    def with_password(self) -> Access:
        """Return the access with the password of the environment, or one that the user types.

        Either is needed only if ``user`` has none.
        """
        if not self.user or ":" in self.user:
            return self
        typed = os.environ.get(PASSWORD) or click.prompt("Password", hide_input=True, err=True)
        return self._replace(user=f"{self.user}:{typed}")

    def session(self) -> aiohttp.ClientSession:
        """Return a session for requests with this access."""
        headers = dict(map(_header, self.header))
        if self.user:
            headers["Authorization"] = f"Basic {base64.b64encode(os.fsencode(self.user)).decode()}"
        # An idle connection would be read without a limit.
        connector = aiohttp.TCPConnector(ssl=self._context() or True, force_close=True)
        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(_stay)
        return aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            response_class=BoundedResponse,
            trace_configs=[tracing],
        )

    def _context(self) -> ssl.SSLContext | None:
        if not (self.cacert or self.cert or self.key or self.insecure):
            return None
        if self.key and not self.cert:
            raise ConfigError("--key needs --cert")
        try:
            context = ssl.create_default_context(cafile=self.cacert or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except OSError as error:
            # OpenSSL's errors are of this class, too, and name no file.
            named = " ".join(filter(None, (self.cacert, self.cert, self.key)))
            is_found = isinstance(error, ssl.SSLError)
            reason = "no such certificate or key in PEM" if is_found else error.strerror
            raise ConfigError(f"{named}: {reason}") from None
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


async def _stay(_: object, __: object, redirect: aiohttp.TraceRequestRedirectParams) -> None:
    """Refuse a redirect to another server, which would get the user's headers and login."""
    headers = redirect.response.headers
    target = redirect.url.join(URL(headers.get("Location", headers.get("URI", ""))))
    if (target.scheme, target.host, target.port) != (
        redirect.url.scheme,
        redirect.url.host,
        redirect.url.port,
    ):
        redirect.response.close()
        raise FetchError(f"it redirects to {target}: give that address")


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip() or not line.isprintable():
        raise ConfigError(f"--header {name!r}: must be like 'Name: value'")
    return name.strip(), value.strip()
