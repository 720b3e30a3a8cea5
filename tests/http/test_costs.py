"""Limits on hostile clients over raw sockets: time, connections, memory, log lines."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest
import uvloop
from aiohttp import web

from exporters import until
from fronts import HASH, PAGE, Site, application, front, user
from sidestep.http.connection import Limits
from sidestep.http.request_guard import TokenBucket
from sidestep.http.web_config import RateLimit

QUICK = Limits(request_seconds=0.4, response_seconds=0.8, check_interval=0.05)
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def raw(site: Site, data: bytes) -> bytes:
    """Return all that the server answers to ``data`` until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(data)
    found = b""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            while more := await reader.read(65536):
                found += more
    writer.close()
    return found


@pytest.mark.parametrize("part", [b"", b"GET", b"GET / HTTP/1.1\r\nHost: x\r\n"])
@pytest.mark.parametrize("before", [0, 2])
async def test_a_slow_request_is_closed(tmp_path: Path, part: bytes, before: int) -> None:
    """A partial request is closed and counted, wherever it stopped, also after complete ones."""
    limits = QUICK if part else Limits(request_seconds=0.4, idle_seconds=0.1, check_interval=0.05)
    async with front(tmp_path, limits=limits) as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        for _ in range(before):
            writer.write(REQUEST)
            await reader.readuntil(b"short\n")
        writer.write(part)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()

        # aiohttp closes a connection without any byte as idle.
        assert site.refused("slow") == bool(part)
        assert site.connections == 0


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 3000 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nno header\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a handshake\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n" * 10 + b"GET\r\n\r\n",
    ],
)
async def test_bad_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes) -> None:
    """A bad request gets 400 and a closed connection; many log one line and no traceback."""
    async with front(tmp_path) as site:
        for _ in range(5):
            assert (await raw(site, data)).startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
        assert await site.status() == 200

    assert len(caplog.records) <= 1
    assert "Traceback" not in caplog.text
    assert "xxxx" not in caplog.text


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (b"0.9", b"HTTP/1.1 505"),
        (b"1.0", b"HTTP/1.0 200"),
        (b"1.1", b"HTTP/1.1 200"),
        (b"2.0", b"HTTP/1.1 505"),
    ],
)
async def test_only_http_1_is_answered(tmp_path: Path, version: bytes, expected: bytes) -> None:
    """A request of another version gets 505 in HTTP/1.1, and its connection is closed."""
    request = b"GET / HTTP/" + version + b"\r\nHost: x\r\nConnection: close\r\n\r\n"
    async with front(tmp_path) as site:
        assert (await raw(site, request)).startswith(expected)
        assert site.refused("bad_request") == expected.endswith(b"505")


async def test_a_bug_in_a_handler_logs_one_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The client receives no details."""
    async with front(tmp_path) as site:
        for _ in range(3):
            answer = await site.get("/broken")
            assert answer.status == 500
            assert b"a bug" not in answer.body

    assert caplog.text.count("RuntimeError: a bug") == 1


async def test_methods(tmp_path: Path) -> None:
    """GET and HEAD are served; other methods get 405 with the allowed ones."""
    async with front(tmp_path) as site:
        head = await site.get(method="HEAD")
        long = await site.get("/long", method="HEAD")
        post = await site.get(method="POST", data=b"x" * 1000)

        assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", "6")
        assert (long.status, long.body) == (200, b"")
        assert long.headers["Content-Length"] == str(len(PAGE))
        assert post.status == 405
        assert post.headers["Allow"] == "GET,HEAD"
        assert "aiohttp" not in head.headers["Server"]


@pytest.mark.parametrize("method", [b"POST", b"GET"])
async def test_long_request_bodies_are_cut_off(tmp_path: Path, method: bytes) -> None:
    """A body of a terabyte is cut off while other clients are served."""
    limits = Limits(body_bytes=200_000, check_interval=0.05)
    async with front(tmp_path, limits=limits) as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(method + b" / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n")
        sent = 0
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while sent < 200_000_000:
                    writer.write(b"x" * 65536)
                    await writer.drain()
                    sent += 65536
        assert await site.status() == 200
        writer.close()
        with contextlib.suppress(ConnectionError):
            await reader.read()

        # The buffers of both kernels come on top of the limit.
        assert sent < 50_000_000
        await until(lambda: site.connections == 0)


async def slow_reader(site: Site, path: str = "/long") -> socket.socket:
    """Return a client that requests the long page and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", site.port))
    await loop.sock_sendall(client, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return client


async def test_a_client_that_reads_nothing_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then it holds less memory than the page."""
    async with front(tmp_path, limits=QUICK) as site:
        clients = [await slow_reader(site) for _ in range(5)]
        await until(lambda: site.front._guard._unsent == 5 * len(PAGE))
        held = [
            connection.transport.get_write_buffer_size()
            for connection in site.front._listener._open  # type: ignore[union-attr]
            if connection.transport is not None
        ]
        assert max(held) < 300_000
        await until(lambda: site.connections == 0)
        for client in clients:
            client.close()

        assert site.refused("slow") == 5
        await until(lambda: site.front._guard._unsent == 0)
    (line,) = caplog.records
    assert line.getMessage() == "closed a connection: 127.0.0.1 took too long"


async def test_unsent_bytes_are_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Above the limit a page is 503 and a short response is not; memory is released again."""
    limits = Limits(response_seconds=2, check_interval=0.05, unsent_bytes=2 * len(PAGE))
    async with front(tmp_path, limits=limits) as site:
        clients = [await slow_reader(site) for _ in range(2)]
        await until(lambda: site.front._guard._unsent == 2 * len(PAGE))
        answer = await site.get("/long")
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert await site.status() == 200
        assert site.refused("overload") == 1
        assert "too many bytes wait for slow clients" in caplog.messages
        await until(lambda: site.connections == 0)
        for client in clients:
            client.close()

        assert (await site.get("/long")).body == PAGE


async def connected(site: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection that has received a response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(REQUEST)
    await reader.readuntil(b"short\n")
    return reader, writer


async def test_connections_are_bounded(tmp_path: Path) -> None:
    """Above the limit a new connection is closed, unless one without any request can be dropped."""
    limits = Limits(connections=10, request_seconds=60, check_interval=0.05)
    async with front(tmp_path, limits=limits) as site:
        clients = [await connected(site) for _ in range(9)]
        # Half of a further request; this connection is older than the silent one, but has had a response.
        clients[0][1].write(REQUEST[:10])
        silent, silent_writer = await asyncio.open_connection("127.0.0.1", site.port)
        await until(lambda: site.connections == 10)
        async with asyncio.timeout(20):
            while await site.status() != 200:
                await asyncio.sleep(0.05)
            with contextlib.suppress(ConnectionError):
                assert await silent.read() == b""
        silent_writer.close()
        assert site.refused("connections") >= 1

        clients.append(await connected(site))
        before = site.refused("connections")
        assert await site.status() == 0
        assert site.refused("connections") > before
        assert site.connections == 10
        clients[0][1].write(REQUEST[10:])
        await clients[0][0].readuntil(b"short\n")
        for reader, writer in clients[1:]:
            writer.write(REQUEST)
            await reader.readuntil(b"short\n")
        for _, writer in clients:
            writer.close()


async def test_concurrent_renders_are_bounded(tmp_path: Path) -> None:
    """Some pages render, the rest wait; health is not limited."""
    gate, running, most = asyncio.Event(), 0, 0
    app = application()

    async def held(_: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        return web.Response(text="made\n")

    app.add_routes([web.get("/held", held)])
    limits = Limits(concurrent_renders=2)
    async with front(tmp_path, limits=limits, app=app) as site:
        requests = [asyncio.create_task(site.status(path="/held")) for _ in range(100)]
        await until(lambda: site.connections == 100)
        await until(lambda: running == 2)
        assert await site.status(path="/-/healthy") == 200
        gate.set()
        found = await asyncio.gather(*requests)

    assert found == [200] * 100
    assert most == 2


async def test_the_rate_limit(tmp_path: Path) -> None:
    """A burst is served, then 429 follows, before any password is verified."""
    text = f"rate_limit: {{interval: 1h, burst: 3}}\nbasic_auth_users: {{alice: {HASH}}}\n"
    async with front(tmp_path, text) as site:
        found = [await site.status(headers=user("alice", "sesame")) for _ in range(5)]
        found.append(await site.status())

        assert found == [200, 200, 200, 429, 429, 429]
        assert site.denied("rate_limit") == 3


def test_the_token_bucket() -> None:
    """One token arrives per interval, and never more than the burst accumulate."""
    now = [0.0]
    bucket = TokenBucket(RateLimit(2.0, 2), lambda: now[0])
    taken = []
    for at in (0, 0, 0, 1.9, 2.0, 2.1, 100, 100, 100):
        now[0] = at
        taken.append(bucket.take())

    assert taken == [True, True, False, False, True, False, True, True, False]


async def test_headers(tmp_path: Path) -> None:
    """Configured headers are on every page and error; there are none by default."""
    names = ("X-Content-Type-Options", "X-Frame-Options", "Content-Security-Policy")
    async with front(tmp_path) as site:
        assert not set(names) & set((await site.get()).headers)
    text = (
        f"basic_auth_users: {{alice: {HASH}}}\nhttp_server_config:\n  headers:\n"
        "    X-Content-Type-Options: nosniff\n    X-Frame-Options: deny\n"
        "    X-XSS-Protection: ''\n    Content-Security-Policy: default-src 'self'\n"
    )
    async with front(tmp_path, text) as site:
        for path, headers in (("/", {}), *((p, user("alice", "sesame")) for p in ("/", "/no"))):
            answer = await site.get(path, headers=headers)
            found = [answer.headers.get(name) for name in names]
            assert found == ["nosniff", "deny", "default-src 'self'"]
            assert "X-XSS-Protection" not in answer.headers


def test_a_client_that_comes_while_the_server_stops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it is accepted it gets its page, and nothing is logged."""

    async def answer(passes: int) -> bytes:
        async with front(tmp_path) as site:
            client = site.socket()
            client.sendall(REQUEST)
            while not site.connections:
                await asyncio.sleep(0)
            for _ in range(passes):
                await asyncio.sleep(0)
        with client:
            client.settimeout(10)
            return client.recv(15)

    # As the exporter runs: asyncio's own transports say that they are closed.
    answers = {uvloop.run(answer(passes)) for passes in range(6)}

    assert answers == {b"HTTP/1.1 200 OK"}
    assert not caplog.records
