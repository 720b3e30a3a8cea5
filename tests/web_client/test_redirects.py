"""Redirects: the user's headers and login go to the server that the user named, and to no other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sidestep_tools.top.targets import Target
from sidestep_tools.web_client.access import Access
from sidestep_tools.web_client.fetch import FetchError, fetch
from web_servers import server

ACCESS = Access(user="u:p", header=("X-Api-Key: secret",))
Client = Callable[[aiohttp.ClientSession, str], Awaitable[Any]]


async def ask_exporter(session: aiohttp.ClientSession, url: str) -> str:
    """Return the text of a page, as doctor does."""
    return (await fetch(session, f"{url}/metrics")).text


async def ask_top(session: aiohttp.ClientSession, url: str) -> object:
    """Poll a target of ``sidestep top``."""
    found = await Target(url).poll(session)
    if found.error:
        raise FetchError(found.error)
    return found


@pytest.mark.parametrize("client", [ask_exporter, ask_top])
@pytest.mark.parametrize("location", ["http://{}/metrics", "https://{}/metrics", "//{}/metrics"])
async def test_another_server_gets_no_headers(client: Client, location: str) -> None:
    """A redirect to another scheme, host or port is an error that names the address."""
    asked: list[str] = []

    async def other(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text="# none\n")

    async with server(other, "/{path:.*}") as there:
        to = location.format(there.removeprefix("http://"))

        async def redirect(_: web.Request) -> web.Response:
            return web.Response(status=307, headers={"Location": to})

        async with server(redirect, "/{path:.*}") as here, ACCESS.session() as session:
            with pytest.raises(FetchError, match=r"redirects to http.*: give that address"):
                await client(session, here)
    assert asked == []


async def test_a_redirect_on_one_server_is_followed() -> None:
    """A page such as vLLM's /metrics is at /metrics/, where it gets the headers, too."""

    async def page(request: web.Request) -> web.Response:
        if request.path != "/metrics/":
            return web.Response(status=307, headers={"Location": "/metrics/"})
        return web.Response(text=request.headers["X-Api-Key"])

    async with server(page, "/{path:.*}") as url, ACCESS.session() as session:
        assert await ask_exporter(session, url) == "secret"
