"""Reasons of a failed request, and addresses that are none: one line each, in words that say what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from command_line import one_line, sidestep
from sidestep.errors import ConfigError
from sidestep_tools.web_client.access import Access
from sidestep_tools.web_client.fetch import FetchError, fetch, parse_address
from web_servers import server


@asynccontextmanager
async def sending(answer: bytes) -> AsyncIterator[str]:
    """Run a server that sends the same bytes to everybody and closes."""

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        await writer.drain()
        writer.close()

    found = await asyncio.start_server(send, "127.0.0.1", 0)
    async with found:
        yield f"127.0.0.1:{found.sockets[0].getsockname()[1]}"


async def failure(url: str) -> str:
    """Return why a request fails."""
    async with Access().session() as session:
        with pytest.raises(FetchError) as caught:
            await fetch(session, url)
    return str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "answer", "reason"),
    [
        ("http", b"SSH-2.0-OpenSSH_9\r\n", "no HTTP answer: Bad status line: "),
        ("http", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "cut short or damaged"),
        (
            "http",
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nno gzip at all",
            "cut short or damaged",
        ),
        (
            "https",
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            "no TLS there (WRONG_VERSION_NUMBER): is it",
        ),
    ],
    ids=["ssh", "short", "gzip", "no-tls"],
)
async def test_an_answer_that_is_none(scheme: str, answer: bytes, reason: str) -> None:
    """The line has neither a status nor an address that the server did not send."""
    async with sending(answer) as address:
        said = await failure(f"{scheme}://{address}/metrics")

    assert reason in said
    assert "message=" not in said
    assert "_ssl.c" not in said


async def test_a_redirect_to_itself() -> None:
    """A request ends after some of them."""

    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": request.path})

    async with server(redirect) as url:
        assert await failure(f"{url}/metrics") == "it redirects without end"


@pytest.mark.parametrize(
    "url",
    ["", "::1", "[::1", "[::1]:x", "http://u:secret@h:x", "h:99999", "ftp://h", "//", "http://"],
)
def test_an_address_that_is_none(url: str) -> None:
    """The line shows the form, and no password."""
    with pytest.raises(ConfigError, match=r"must be a URL such as http://HOST:PORT") as caught:
        parse_address(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["doctor", __file__], "is a file: why reads it by --from, doctor by --engine-page"),
        (["why", __file__], "is a file: why reads it by --from"),
        (["doctor", "--key", "k.pem", "https://h"], "--key needs --cert"),
        (["doctor", "--cert", __file__, "https://h"], "no such certificate or key in PEM"),
        (["doctor", "--cacert", __file__, "https://h"], "no such certificate or key in PEM"),
        (["doctor", "--cert", "/no/such", "https://h"], "/no/such: No such file or directory"),
    ],
    ids=["file", "why-file", "key-only", "cert", "cacert", "no-cert"],
)
def test_a_wrong_file_is_one_line(arguments: Sequence[str], what: str) -> None:
    """It names the file, or the option that takes it."""
    one_line(sidestep(*arguments), 2, what)


async def test_a_password_of_any_bytes() -> None:
    """Bytes that are not UTF-8 are sent as they were typed."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=request.headers["Authorization"])

    async with server(answer) as url, Access(user="u:\udcff").session() as session:
        assert (await fetch(session, f"{url}/metrics")).text == "Basic dTr/"
