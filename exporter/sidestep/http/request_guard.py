"""Checks on every request: rate limit, password or host, overload; and headers of every response."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

from aiohttp import HttpVersion10, HttpVersion11, web

from sidestep.http.auth import Busy, PasswordVerifier, credentials
from sidestep.http.chunked_response import PIECE, PartsResponse
from sidestep.http.connection import serving
from sidestep.http.current_config import CurrentConfig
from sidestep.http.limits import Limits, TokenBucket
from sidestep.http.web_config import WebConfig
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics

log = logging.getLogger(__name__)


class Overload(Exception):  # noqa: N818 - a result, not an error
    """Too much is in progress."""


class ResponseLimiter:
    """Bounds the responses that are being rendered and sent."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.render_slots = asyncio.Semaphore(limits.concurrent_renders)
        """Concurrent renders; each connection has one request that waits for one, the first first."""
        self.unsent = 0

    async def send(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Send a long body as the client reads it.

        Returns:
            A response that is sent, or ``response`` unchanged if it is short or has no body.

        Raises:
            Overload: With it, too many bytes would wait for clients.
        """
        body = response.body if isinstance(response, web.Response) else None
        if isinstance(body, bytes) and len(body) > PIECE:
            response = PartsResponse([body], response.headers, status=response.status)
        if not isinstance(response, PartsResponse) or request.method == "HEAD":
            return response
        if self.unsent + response.size > self._limits.unsent_bytes:
            raise Overload
        self.unsent += response.size
        try:
            await response.prepare(request)
            await response.write_eof()
        except ConnectionError:
            pass  # the client has disconnected; aiohttp ends the connection silently
        finally:
            self.unsent -= response.size
        return response


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


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DENIED = ("client_cert", "no_password", "password", "rate_limit", "overload")
"""Reasons of ``sidestep_auth_denied_total``."""
UNSUPPORTED_VERSION = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)


class RequestGuard:
    """Middleware before every page, health included, as in exporter-toolkit."""

    def __init__(
        self,
        current: CurrentConfig,
        metrics: SelfMetrics,
        limits: Limits,
        allowed_hosts: Collection[str],
    ) -> None:
        self._current = current
        self._allowed_hosts = allowed_hosts
        self._metrics = metrics
        self._limits = limits
        self._responses = ResponseLimiter(limits)
        self._limited = RateLimitedLog(log)
        self._executor = ThreadPoolExecutor(1, "sidestep-bcrypt")
        self._config = WebConfig()
        self._passwords: PasswordVerifier | None = None
        self._bucket: TokenBucket | None = None
        self.apply(current.active.config)
        for reason in DENIED:
            metrics.add("sidestep_auth_denied_total", 0, reason)

    def attach(self, app: web.Application) -> None:
        """Add the middleware to ``app``."""
        app.middlewares.append(self._middleware)
        app.on_response_prepare.append(self._headers)

    def close(self) -> None:
        """Stop verifying passwords."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def apply(self, config: WebConfig) -> None:
        """Apply users and rate limit; changed users start with an empty cache of passwords."""
        if config.users != self._config.users:
            known = PasswordVerifier(config.users, self._executor, self._limits.waiting_passwords)
            self._passwords = known if config.users else None
        if config.rate_limit != self._config.rate_limit:
            self._bucket = TokenBucket(config.rate_limit) if config.rate_limit else None
        self._config = config

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        with _response_deadline():
            if request.version not in (HttpVersion10, HttpVersion11):
                self._metrics.add("sidestep_http_refused_total", 1, "bad_request")
                return _refused_version(request)
            await self._current.refreshed()
            refusal = await self._refusal(request)
            if refusal is not None:
                return refusal
            try:
                if request.path.startswith("/-/"):
                    # Probes do not wait for pages that are being rendered.
                    response = await handler(request)
                else:
                    async with self._responses.render_slots:
                        response = await handler(request)
                return await self._responses.send(request, response)
            except Overload:
                self._metrics.add("sidestep_http_refused_total", 1, "overload")
                self._limited.warning("overload", "too many bytes wait for slow clients")
                return _refused(503, "Service Unavailable", {"Retry-After": "1"})

    async def _refusal(self, request: web.Request) -> web.StreamResponse | None:
        """Return the error response to a request that is denied; None if it is admitted."""
        if self._bucket is not None and not self._bucket.take():
            self._deny("rate_limit", request)
            return _refused(429, "Too Many Requests", {})
        if self._passwords is None:
            return self._check_host(request)
        given = credentials(request.headers.get("Authorization", ""))
        if given is None:
            self._deny("no_password", request)
            return _unauthorized()
        try:
            if await self._passwords.is_valid(*given):
                return None
        except Busy:
            self._deny("overload", request)
            return _refused(503, "Service Unavailable", {"Retry-After": "1"})
        self._deny("password", request)
        return _unauthorized()

    def _check_host(self, request: web.Request) -> web.StreamResponse | None:
        # With TLS the certificate is not that of a web site.
        if request.secure or is_expected(request, self._allowed_hosts):
            return None
        self._metrics.add("sidestep_http_refused_total", 1, "host")
        host = request.headers.get("Host", "")
        self._limited.warning("host", "refused the host %.100r: %s", host, ADVICE)
        return _refused(421, f"Misdirected Request: {ADVICE}", {})

    def _deny(self, reason: str, request: web.Request) -> None:
        self._metrics.add("sidestep_auth_denied_total", 1, reason)
        self._limited.warning(reason, "denied a request of %s: %s", request.remote, reason)

    async def _headers(self, _: web.Request, response: web.StreamResponse) -> None:
        """Set the configured headers; Server reveals no versions."""
        response.headers["Server"] = "sidestep"
        for name, value in self._config.headers.items():
            if value:
                response.headers[name] = value


@contextlib.contextmanager
def _response_deadline() -> Iterator[None]:
    connection = serving.get()
    connection.request_started()
    try:
        yield
    finally:
        connection.response_finished()


def _unauthorized() -> web.StreamResponse:
    return _refused(401, "Unauthorized", {"WWW-Authenticate": 'Basic realm="sidestep"'})


def _refused(status: int, text: str, headers: dict[str, str]) -> web.StreamResponse:
    """Return an error response that closes the connection: only admitted clients keep one open."""
    response = web.Response(status=status, text=f"{text}\n", headers=headers)
    response.force_close()
    return response


def _refused_version(request: web.Request) -> web.StreamResponse:
    """Send an error response in HTTP/1.1 and close the connection."""
    if request.transport is not None:
        # aiohttp's own response would have the request's version; it is not sent after the close.
        request.transport.write(UNSUPPORTED_VERSION)
        request.transport.close()
    return web.Response(status=505)
