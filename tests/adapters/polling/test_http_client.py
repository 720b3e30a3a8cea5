"""Requests to real servers, and the one cause of each failure."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fronts import Authority
from polled import Says, answer, head, page, polled, raw, stall
from sidestep.config import scrape_targets as polls
from sidestep.errors import ConfigError, PollError
from sidestep_adapters.polling import http_client
from sidestep_adapters.polling.http_client import Client
from sidestep_tools.web_client.access import Access
from sidestep_tools.web_client.fetch import FetchError
from sidestep_tools.web_client.fetch import fetch as web_fetch

BODY = b"a 1\n"
CHUNKED = head(None, more="Transfer-Encoding: chunked\r\n")


@contextlib.asynccontextmanager
async def client(text: str) -> AsyncIterator[Client]:
    """Return a client of the target in ``text``."""
    made = Client(polls.parse(text))
    try:
        yield made
    finally:
        await made.close()


async def fetch(made: Client) -> bytes:
    """Send one request; return the body."""
    return b"".join((await made.request(made.target.url, "text/plain", ("text/plain",))).chunks)


async def cause(text: str) -> PollError:
    """Return the error of a failed request."""
    async with client(text) as made:
        with pytest.raises(PollError) as error:
            await fetch(made)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
    return error.value


async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send informational responses for ever."""
    while True:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
        await writer.drain()


async def test_informational_responses_end() -> None:
    """The connection is closed, long before the timeout, so that the event loop is free for others."""
    async with polled(endless) as server:
        error = await cause(f"{server.url},timeout=600")
        assert error.cause == "bad_answer"
        async with Access().session() as session:
            with pytest.raises(FetchError, match="informational"):
                await web_fetch(session, server.url)


async def test_a_connection_is_kept_with_keepalive() -> None:
    """A new one is made after the server has closed it."""
    async with polled(page(BODY)) as server, client(f"{server.url},keepalive=true") as made:
        await fetch(made)
        await fetch(made)
        assert server.connections == 1
        server.hang_up()
        await asyncio.sleep(0.05)
        await fetch(made)

    assert server.connections == 2


async def test_a_secret_is_read_for_every_request(tmp_path: Path) -> None:
    """A secret's file may change between requests; the header's text before it stays."""
    file = tmp_path / "token"
    file.write_text("one\n")
    async with polled(page(BODY)) as server:
        text = f"{server.url},header.Authorization=Bearer @{file},header.accept=*/*"
        async with client(text) as made:
            await fetch(made)
            file.write_text("two\n")
            await fetch(made)
            file.unlink()
            with pytest.raises(PollError, match="No such file") as error:
                await fetch(made)

    assert "Authorization: Bearer one\r\n" in server.heads[0]
    assert "accept: */*\r\n" in server.heads[0]
    assert "text/plain" not in server.heads[0]
    assert "Authorization: Bearer two\r\n" in server.heads[1]
    assert error.value.cause == "unreadable"
    assert len(server.heads) == 2


SLOW = [
    stall(),
    stall(head(100), b"a 1\n"),
    stall(head(None), *[b"a"] * 1000, every=0.01),
]


@pytest.mark.parametrize("says", SLOW, ids=["nothing", "half a body", "drips"])
async def test_a_slow_server_is_not_unreachable(says: Says) -> None:
    """The timeout covers the whole response, even while bytes arrive."""
    async with polled(says) as server:
        started = time.monotonic()
        error = await cause(f"{server.url},timeout=0.2")

    assert error.cause == "slow"
    assert 0.2 <= time.monotonic() - started < 2


WRONG = [
    (raw(b"no http at all\r\n\r\n"), "bad_answer", ""),
    (page(BODY, kind="text/html"), "bad_answer", "the response is text/html, not text/plain"),
    (page(BODY, kind="application/json"), "bad_answer", "the response is application/json"),
    (
        raw(head(4, more="Content-Encoding: gzip\r\n"), BODY),
        "bad_answer",
        "the response is encoded as gzip",
    ),
    (raw(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 9, answer(BODY)), "bad_answer", "more than 8 infor"),
    (raw(head(40), BODY), "truncated", "after 4 bytes"),
    (raw(CHUNKED, b"2\r\na "), "truncated", "after 2 bytes"),
    (raw(CHUNKED, b"4\r\na 1\n\r\n"), "truncated", "after 4 bytes"),
    (page("", "302 Found"), "http_302", "Found"),
    (page('{"error": "not\\nyet"}', "503 x"), "http_503", "not yet"),
    (page("[" * 5000, "500 Oh"), "http_500", "Oh"),
    (page(b'{"error": "\xff"}', "500 Oh"), "http_500", "Oh"),
    (page('{"error": "' + "a" * 900 + '"}', "400 Bad"), "http_400", "a" * 200),
    (stall(head(9, "503 Wait")), "http_503", "Wait"),
]


@pytest.mark.parametrize(("says", "expected", "detail"), WRONG)
async def test_each_failure_has_one_cause(
    says: Says, expected: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is one short printable line, for any response."""
    monkeypatch.setattr(http_client, "REASON_SECONDS", 0.1)
    async with polled(says) as server:
        error = await cause(server.url)

    assert error.cause == expected
    assert detail in str(error)


async def test_an_endless_response_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response ends at the size limit, before memory is full."""
    monkeypatch.setattr(http_client, "MAX_BODY_BYTES", 1 << 20)
    async with polled(raw(head(None), *[b"#" * 65536] * 10_000)) as server:
        error = await cause(server.url)

    assert (error.cause, "more than 1 MiB" in str(error)) == ("bad_answer", True)


async def test_failed_connections_are_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are refused, unknown, closed, or without TLS."""
    monkeypatch.setattr(http_client, "CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with polled(hang_up) as server:
        urls = [
            f"http://127.0.0.1:{port}",
            "http://nothing.invalid",
            server.url,
            server.url.replace("http:", "https:"),
        ]
        for url in urls:
            assert (await cause(url)).cause == "unreachable"


async def test_tls_trusts_the_given_ca_only(tmp_path: Path) -> None:
    """Other certificates are rejected; a client certificate is sent if requested."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    authority.ca.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(
        tmp_path / "client.pem"
    )
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.file))
    authority.ca.issue_cert("127.0.0.1").configure_cert(tls)
    async with polled(page(BODY), tls) as server:
        async with client(f"{server.url},ca={authority.file}") as made:
            assert await fetch(made) == BODY
        assert "CERTIFICATE_VERIFY_FAILED" in str(await cause(server.url))
        assert (await cause(f"{server.url},ca={other.file}")).cause == "unreachable"
    tls.verify_mode = ssl.CERT_REQUIRED
    async with polled(page(BODY), tls) as server:
        known = f"{server.url},ca={authority.file}"
        async with client(f"{known},cert={tmp_path}/client.pem") as made:
            assert await fetch(made) == BODY
        assert (await cause(known)).cause == "unreachable"


async def test_renewed_cas_are_read(tmp_path: Path) -> None:
    """The next request reads them; until they are readable, polls fail."""
    former, present = Authority(tmp_path), Authority(tmp_path, "present")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    present.ca.issue_cert("127.0.0.1").configure_cert(tls)
    found = []
    async with polled(page(BODY), tls) as server, client(f"{server.url},ca={former.file}") as made:
        for text in (former.file.read_text(), "half of it", present.file.read_text()):
            former.file.write_text(text)
            try:
                found.append((await fetch(made)).decode())
            except PollError as error:
                found.append(error.cause)

    assert found == ["unreachable", "unreadable", "a 1\n"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("header.a=@{0}/two-lines", "two-lines: not one line of ASCII"),
        ("ca={0}/none", "cannot read .*/none: No such file"),
        ("ca={0}/two-lines", "no PEM certificate of a CA"),
        ("cert={0}/two-lines", "two-lines: not a PEM certificate"),
        ("cert={0}/ca.pem,key={0}/two-lines", "not a PEM certificate and its PEM key"),
    ],
)
def test_files_are_checked_before_the_first_request(
    tmp_path: Path, options: str, complaint: str
) -> None:
    """The operator gets one error line."""
    Authority(tmp_path)
    (tmp_path / "two-lines").write_text("a\nb\n")

    with pytest.raises(ConfigError, match=complaint):
        Client(polls.parse(f"https://h,{options.format(tmp_path)}")).check()
