"""One GET request, and the reason of its failure as a line of text."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from email.utils import mktime_tz, parsedate_tz
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

from sidestep.errors import ConfigError, drop_frames

TIMEOUT = 5.0
"""Seconds that a server has to answer."""
MAX_BYTES = 64 << 20
"""Most bytes of an answer."""
DENIED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class FetchError(Exception):
    """An address that cannot be read; the text is one line."""


class Answer(NamedTuple):
    """Status and body; the body is empty unless the status is 200.

    Attributes:
        time: Unix time by the server's clock; None if it does not say.
    """

    status: int
    content_type: str
    text: str
    time: float | None = None


class Address(NamedTuple):
    """Parts of a server's address."""

    scheme: str
    host: str
    port: int
    path: str
    root: str
    """Scheme, host and port as given."""


def parse_address(url: str) -> Address:
    """Return the parts of ``url``; without a scheme it gets http.

    Raises:
        ConfigError: It is no address of a web server, or contains a password.
    """
    if "://" not in url and os.path.isfile(url):  # noqa: PTH113 - Path.is_file raises for long texts
        raise ConfigError(f"{url} is a file: why reads it by --from, doctor by --engine-page")
    # A password may stand before the @.
    wrong = ConfigError(
        f"{url.rpartition('@')[2]!r}: must be a URL such as http://HOST:PORT or http://[IPV6]:PORT"
    )
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong
    if parts.username is not None:
        raise ConfigError(f"{parts.hostname}: give the password by --user, not in the URL")
    port = port or {"http": 80, "https": 443}[parts.scheme]
    return Address(
        parts.scheme, parts.hostname, port, parts.path, f"{parts.scheme}://{parts.netloc}"
    )


async def fetch(session: aiohttp.ClientSession, url: str, timeout: float | None = None) -> Answer:
    """Return the answer of ``url``, whatever its status.

    Raises:
        FetchError: There is none within ``timeout`` seconds, or ``TIMEOUT``; or it is too long.
    """
    timeout = timeout or TIMEOUT
    with explained(timeout):
        return await asyncio.wait_for(_get(session, url), timeout)


async def _get(session: aiohttp.ClientSession, url: str) -> Answer:
    async with session.get(url) as answer:
        if answer.status != HTTPStatus.OK:
            return Answer(answer.status, answer.content_type, "")
        parts, size = [], 0
        async for part in answer.content.iter_chunked(1 << 16):
            parts.append(part)
            size += len(part)
            if size > MAX_BYTES:
                raise FetchError(f"its page is longer than {MAX_BYTES >> 20} MiB")
        text = b"".join(parts).decode("utf-8", "replace")
        date = parsedate_tz(answer.headers.get("Date"))
        return Answer(answer.status, answer.content_type, text, date and mktime_tz(date))


@contextlib.contextmanager
def explained(timeout: float | None = None) -> Iterator[None]:
    """Raise the errors of requests within the block as ``FetchError``."""
    try:
        yield
    except (FetchError, asyncio.TimeoutError, aiohttp.ClientError, ValueError) as failure:
        error = _explanation(failure, timeout or TIMEOUT)
        # The frames of an error that wait_for raises keep its task alive.
        drop_frames(failure)
    else:
        return
    # A message of another program may have several lines.
    raise FetchError(" ".join(error.split())[:300])


def _explanation(failure: Exception, timeout: float) -> str:
    match failure:
        case asyncio.TimeoutError():  # not yet the builtin in 3.10
            return f"no answer within {timeout:g} s"
        case aiohttp.ClientConnectorError() | aiohttp.ClientConnectorCertificateError():
            return _no_connection(failure)
        case aiohttp.TooManyRedirects():
            return "it redirects without end"
        case aiohttp.ClientPayloadError():
            return "its answer is cut short or damaged"
        case aiohttp.ClientError():
            return f"no HTTP answer: {_reason(failure)}"
    return str(failure)


def _no_connection(
    failure: aiohttp.ClientConnectorError | aiohttp.ClientConnectorCertificateError,
) -> str:
    match failure:
        case aiohttp.ClientConnectorCertificateError():
            found = failure.certificate_error
            reason = getattr(found, "verify_message", "") or found
            return f"its certificate is not trusted: {reason} (--cacert, -k)"
        case aiohttp.ClientConnectorSSLError():
            reason = getattr(failure.os_error, "reason", "") or failure.os_error
            return f"no TLS there ({reason}): is it http://?"
    return f"cannot connect: {_reason(failure.os_error)}"


def refusal(status: int) -> str:
    """Return why a server refused a request."""
    if status in DENIED:
        return f"HTTP {status}: it needs a password or a header (--user, --header)"
    return f"HTTP {status}"


def _reason(error: Exception) -> str:
    """Return the message of the system, or of aiohttp, without the address that they repeat."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno) if error.errno > 0 else error.strerror or str(error)
    return getattr(error, "message", "") or str(error) or type(error).__name__
