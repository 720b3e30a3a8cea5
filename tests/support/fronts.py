"""An HTTP server with a small application, certificates of a test authority, and clients."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import warnings
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import bcrypt
import trustme
from aiohttp import web

from sidestep.http.connection import Limits
from sidestep.http.server import HttpServer
from sidestep.telemetry.self_metrics import SelfMetrics

HASH = bcrypt.hashpw(b"sesame", bcrypt.gensalt(4)).decode()
"""Hash of ``sesame`` at bcrypt's lowest cost."""
PAGE = b"".join(b'a_counter_total{number="%d"} 1\n' % number for number in range(400_000))


class Authority:
    """A certificate authority and the files of its certificates."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self.directory = directory
        self.ca = trustme.CA()
        self.file = directory / f"{name}.pem"
        self.ca.cert_pem.write_to_path(self.file)

    def server(self, name: str = "server") -> str:
        """Write a certificate and key for 127.0.0.1, and return the configuration that names them."""
        issued = self.ca.issue_cert("127.0.0.1", "localhost")
        issued.cert_chain_pems[0].write_to_path(self.directory / f"{name}.pem")
        issued.private_key_pem.write_to_path(self.directory / f"{name}-key.pem")
        return f"cert_file: {name}.pem\n  key_file: {name}-key.pem\n"

    def client(self, *names: str) -> ssl.SSLContext:
        """Return a client context that trusts the authority, with a certificate for ``names`` if any."""
        context = ssl.create_default_context(cafile=str(self.file))
        if names:
            self.ca.issue_cert(*names).configure_cert(context)
        return context


@dataclasses.dataclass
class Site:
    """A running server."""

    front: HttpServer
    metrics: SelfMetrics
    port: int
    file: Path

    @property
    def connections(self) -> float:
        """Return the number of open connections."""
        ((_, samples),) = self.metrics.samples({"sidestep_http_connections"})
        return samples[0][1]

    def denied(self, reason: str) -> float:
        """Return how many requests were denied for ``reason``."""
        return self.metrics.value("sidestep_auth_denied_total", reason)

    def refused(self, reason: str) -> float:
        """Return how many requests were refused by a limit."""
        return self.metrics.value("sidestep_http_refused_total", reason)

    def socket(self) -> socket.socket:
        """Open a plain connection."""
        return socket.create_connection(("127.0.0.1", self.port), 10)

    async def get(
        self, path: str = "/", tls: ssl.SSLContext | None = None, method: str = "GET", **more: Any
    ) -> Answer:
        """Send one request over a connection of its own."""
        scheme = "https" if tls is not None else "http"
        url = f"{scheme}://127.0.0.1:{self.port}{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, ssl=tls or True, **more) as answer,
        ):
            return Answer(answer.status, answer.headers, await answer.read())

    async def status(self, tls: ssl.SSLContext | None = None, **more: Any) -> int:
        """Return the status of an answer, or 0 if there is none."""
        try:
            return (await self.get(tls=tls, **more)).status
        except (aiohttp.ClientError, ConnectionError):
            return 0


@dataclasses.dataclass
class Answer:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def user(name: str, password: str) -> dict[str, str]:
    """Return the header of basic authentication."""
    return {"Authorization": f"Basic {b64encode(f'{name}:{password}'.encode()).decode()}"}


def application() -> web.Application:
    """Return an application with a short page, a long one, a health check, and one that fails."""

    async def short(_: web.Request) -> web.StreamResponse:
        return web.Response(text="short\n")

    async def long(_: web.Request) -> web.StreamResponse:
        return web.Response(body=PAGE)

    async def broken(_: web.Request) -> web.StreamResponse:
        raise RuntimeError("a bug")

    app = web.Application()
    app.add_routes([web.get("/", short), web.get("/-/healthy", short)])
    app.add_routes([web.get("/long", long), web.get("/broken", broken)])
    return app


@contextlib.asynccontextmanager
async def front(
    directory: Path,
    config: str | None = None,
    limits: Limits | None = None,
    app: web.Application | None = None,
    *,
    address: str = "127.0.0.1",
) -> AsyncIterator[Site]:
    """Run a server on a free port with the web configuration ``config``."""
    file = directory / "web.yml"
    if config is not None:
        file.write_text(config)
    metrics = SelfMetrics()
    served = HttpServer(str(file) if config is not None else "", metrics, limits)
    bound = socket.create_server((address, 0))
    port = bound.getsockname()[1]
    async with served.serving(app or application(), [bound]):
        yield Site(served, metrics, port, file)


def only(context: ssl.SSLContext, version: ssl.TLSVersion) -> ssl.SSLContext:
    """Restrict ``context`` to one TLS version; an old one gets the signatures that it needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    if version < ssl.TLSVersion.TLSv1_2:
        context.set_ciphers("ALL:@SECLEVEL=0")
    return context
