"""Checks on every request: rate limit, password or host, overload; and headers of every response."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from aiohttp import HttpVersion10, HttpVersion11, web

from sidestep.http.auth import Busy, PasswordVerifier, credentials
from sidestep.http.connection import Limits, serving
from sidestep.http.debug_page import PATH as DEBUG_PATH
from sidestep.http.responses import PIECE, PartsResponse
from sidestep.http.tls import CLIENT_AUTH
from sidestep.http.web_config import RateLimit, WebConfig
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.self_metrics import SelfMetrics

log = logging.getLogger(__name__)


ADVICE = (
    "use the exporter's address, localhost, or the name of this machine without a dot;"
    " --web.allowed-hosts permits other names"
)


def is_expected(request: web.Request, allowed: Collection[str]) -> bool:
    """Return whether a request has a host that no web site can have, or comes over a network.

    A web site's name has a dot. What a network's clients use as names cannot be known.
    """
    host = request.headers.get("Host", "").strip().lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    else:
        host = host.partition(":")[0].rstrip(".")
    if "." not in host or host.endswith(".localhost") or host in allowed or _address(host):
        return True
    return not is_local(request)


def is_local(request: web.Request) -> bool:
    """Return whether a request has come over loopback, from this machine or pod."""
    assert request.transport is not None
    own = request.transport.get_extra_info("sockname")
    address = _address(own[0].partition("%")[0]) if isinstance(own, tuple) else None
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped is not None and mapped.is_loopback


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


class TokenBucket:
    """Admits ``burst`` requests at once, and one more every ``interval`` seconds."""

    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._tokens = float(limit.burst)
        self._at = clock()

    def take(self) -> bool:
        """Return whether a token was left, and use it."""
        now = self._clock()
        grown = (now - self._at) / self._limit.interval
        self._tokens = min(self._tokens + grown, self._limit.burst)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


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
        config: WebConfig,
        metrics: SelfMetrics,
        limits: Limits,
        allowed_hosts: Collection[str],
    ) -> None:
        self._allowed_hosts = allowed_hosts
        self._metrics = metrics
        self._limits = limits
        # Each connection has one request that waits for one, the first first.
        self._render_slots = asyncio.Semaphore(limits.concurrent_renders)
        self._unsent = 0
        """Bytes of responses that are being sent."""
        self._limited = RateLimitedLog(log)
        self._executor = ThreadPoolExecutor(1, "sidestep-bcrypt")
        self._config = WebConfig()
        self._passwords: PasswordVerifier | None = None
        self._bucket: TokenBucket | None = None
        self.apply(config)
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
        connection = serving.get()
        connection.request_started()
        try:
            if request.version not in (HttpVersion10, HttpVersion11):
                self._metrics.add("sidestep_http_refused_total", 1, "bad_request")
                return _refused_version(request)
            refusal = await self._refusal(request)
            if refusal is not None:
                return refusal
            if request.path.startswith("/-/"):
                # Probes do not wait for pages that are being rendered.
                response = await handler(request)
            else:
                async with self._render_slots:
                    response = await handler(request)
            return await self._send(request, response)
        finally:
            connection.response_finished()

    async def _send(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        """Send a long body as the client reads it, unless too many bytes wait for clients.

        Returns:
            A response that is sent, or ``response`` unchanged if it is short or has no body.
        """
        body = response.body if isinstance(response, web.Response) else None
        if isinstance(body, bytes) and len(body) > PIECE:
            response = PartsResponse([body], response.headers, status=response.status)
        if not isinstance(response, PartsResponse) or request.method == "HEAD":
            return response
        if self._unsent + response.size > self._limits.unsent_bytes:
            self._metrics.add("sidestep_http_refused_total", 1, "overload")
            self._limited.warning("overload", "too many bytes wait for slow clients")
            return _refused(503, "Service Unavailable", {"Retry-After": "1"})
        self._unsent += response.size
        try:
            await response.prepare(request)
            await response.write_eof()
        except ConnectionError:
            pass  # the client has disconnected; aiohttp ends the connection silently
        finally:
            self._unsent -= response.size
        return response

    async def _refusal(self, request: web.Request) -> web.StreamResponse | None:
        """Return the error response to a request that is denied; None if it is admitted."""
        if self._bucket is not None and not self._bucket.take():
            self._deny("rate_limit", request)
            return _refused(429, "Too Many Requests", {})
        if self._passwords is None:
            return self._check_host(request) or self._check_debug(request)
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

    def _check_debug(self, request: web.Request) -> web.StreamResponse | None:
        tls = self._config.tls
        has_login = tls is not None and tls.client_auth == CLIENT_AUTH[-1]
        if request.path != DEBUG_PATH or has_login or is_local(request):
            return None
        return _refused(
            403, "Forbidden: only over loopback, or with a login (--web.config.file)", {}
        )

    def _deny(self, reason: str, request: web.Request) -> None:
        self._metrics.add("sidestep_auth_denied_total", 1, reason)
        self._limited.warning(reason, "denied a request of %s: %s", request.remote, reason)

    async def _headers(self, _: web.Request, response: web.StreamResponse) -> None:
        """Set the configured headers; Server reveals no versions."""
        response.headers["Server"] = "sidestep"
        for name, value in self._config.headers.items():
            if value:
                response.headers[name] = value


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
