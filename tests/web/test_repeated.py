"""Answers that are given again before aiohttp sees the request: the same ones, and only where they may be."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import operator
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conftest import until
from fronts import HASH, Authority, Site, front, user
from sidestep.http.limits import Limits
from sidestep.http.repeated import LONGEST, MANY, LastingResponse, Repeated, never

LASTING = b"GET /lasting HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n"


EXPECT = b"GET /lasting HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n\r\n"
OTHER = b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = LASTING.replace(b"GET", b"HEAD")
LENGTH = b"Host: x\r\nContent-Length: %d\r\n\r\n" % len(LASTING)
POST = b"POST /other HTTP/1.1\r\n" + LENGTH + LASTING
BODY = b"GET /lasting HTTP/1.1\r\n" + LENGTH + LASTING
CHUNKED = (
    b"POST /other HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
)
CHUNKED %= len(LASTING), LASTING
INSIDE = b"GET /other HTTP/1.1\r\nX: " + LASTING
BLANK = b"\r\n" + LASTING
ANSWERS = {
    LASTING: b"/lasting gzip\n" * 2,
    BLANK: b"/lasting gzip\n" * 2,
    BODY: b"/lasting None\n" * 2,
    HEAD: b"",
}
"""Of those that the other page does not answer, which counts."""
KINDS = (LASTING, OTHER, HEAD, POST, BODY, CHUNKED, INSIDE, BLANK)

TURNS = 40
"""In so many turns of the loop, whatever could be answered is."""


@dataclasses.dataclass
class Served:
    """A front with one lasting page beside others, and what of it was asked of the application.

    Attributes:
        page: Answers hold until there is another one.
    """

    site: Site
    asked: Counter[str]
    page: list[int]


@contextlib.asynccontextmanager
async def serving(
    directory: Path, config: str | None = None, limits: Limits | None = None
) -> AsyncIterator[Served]:
    """Answers say which request of its path they are to, but the lasting ones of other queries."""
    asked: Counter[str] = Counter()
    page = [1]

    async def lasting(request: web.Request) -> web.StreamResponse:
        asked[request.path] += 1
        # As a page does that is in the making; meanwhile more may come.
        await asyncio.sleep(0)
        text = f"{request.path_qs} {request.headers.get('Accept-Encoding')}\n"
        headers = {"Content-Type": "text/plain", "Vary": "Accept"}
        times = int(request.query.get("times", 2))
        return LastingResponse(
            [text.encode()] * times, headers, functools.partial(operator.eq, [*page], page)
        )

    async def other(request: web.Request) -> web.StreamResponse:
        asked[request.path] += 1
        return web.Response(text=f"other {asked[request.path]}\n")

    app = web.Application()

    async def fleeting(_: web.Request) -> web.StreamResponse:
        return LastingResponse([b"fleeting\n"], {}, never)

    app.add_routes([web.get("/lasting", lasting), web.route("*", "/other", other)])
    app.add_routes([web.get("/fleeting", fleeting)])
    async with front(directory, config, limits, app) as site:
        yield Served(site, asked, page)


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self, *, body: bool = True) -> tuple[bytes, bytes]:
        """The next one's head and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        assert length is not None
        return head, await self.reader.readexactly(int(length[1]) if body else 0)

    async def ask(self, request: bytes, *, body: bool = True) -> tuple[bytes, bytes]:
        """Send a request in one piece; its answer."""
        self.writer.write(request)
        return await self.answer(body=body)


@contextlib.asynccontextmanager
async def connected(site: Site) -> AsyncIterator[Client]:
    """A connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    try:
        async with asyncio.timeout(30):
            yield Client(reader, writer)
    finally:
        writer.close()


async def test_the_same_bytes_get_the_same_answer(tmp_path: Path) -> None:
    """Head and all, once the application was asked on that connection; until it does not hold."""
    async with serving(tmp_path) as served, connected(served.site) as one:
        first = await one.ask(LASTING)
        for _ in range(5):
            assert await one.ask(LASTING) == first
        assert served.asked["/lasting"] == 1
        assert b"\r\nServer: sidestep\r\n" in first[0]

        async with connected(served.site) as another:
            # Nobody has looked at this one's connection yet.
            assert (await another.ask(LASTING))[1] == first[1]
            assert served.asked["/lasting"] == 2
            await another.ask(LASTING)
            await one.ask(LASTING)
            assert served.asked["/lasting"] == 2

        for number in (3, 4):
            served.page[0] += 1
            await one.ask(LASTING)
            await one.ask(LASTING)
            assert served.asked["/lasting"] == number


@pytest.mark.parametrize(
    "other",
    [
        LASTING.replace(b"gzip", b"zpig"),
        LASTING.replace(b"/lasting", b"/lasting?view=x"),
        LASTING.replace(b"\r\n\r\n", b"\r\nX: y\r\n\r\n"),
    ],
)
async def test_other_bytes_are_another_request(tmp_path: Path, other: bytes) -> None:
    """Whatever the difference is."""
    async with serving(tmp_path) as served, connected(served.site) as client:
        await client.ask(LASTING)
        answer = await client.ask(other)
        assert served.asked["/lasting"] == 2
        assert await client.ask(other) == answer
        assert served.asked["/lasting"] == 2


@pytest.mark.parametrize(
    "request_",
    [
        LASTING.replace(b"1.1", b"1.0").replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n"),
        LASTING.replace(b"\r\n\r\n", b"\r\nUpgrade: h2c\r\n\r\n"),
        LASTING.replace(b"\r\n\r\n", b"\r\nX: " + b"y" * LONGEST + b"\r\n\r\n"),
        LASTING.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\nxy"),
    ],
)
async def test_what_is_not_repeated(tmp_path: Path, request_: bytes) -> None:
    """Anything but one plain request; the application is asked each time."""
    async with serving(tmp_path) as served, connected(served.site) as client:
        for number in range(1, 4):
            await client.ask(request_)
            assert served.asked["/lasting"] == number


async def test_who_wants_the_end_gets_it(tmp_path: Path) -> None:
    """A connection that is to be closed is."""
    async with serving(tmp_path) as served:
        closing = LASTING.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        for number in range(1, 4):
            async with connected(served.site) as client:
                await client.ask(LASTING)
                await client.ask(closing)
                assert await client.reader.read() == b""
            assert served.asked["/lasting"] == 2 * number


class Piece(NamedTuple):
    """What is sent at once, and for how many turns of the loop nothing follows it."""

    data: bytes
    turns: int


@st.composite
def pieces(draw: st.DrawFn) -> tuple[list[bytes], list[Piece]]:
    """Some requests, twice, and how they come: several at once, or cut where it may matter."""
    kinds = 2 * draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    found: list[Piece] = []
    waiting = b""
    for kind in kinds:
        inner = kind.index(LASTING[4:]) - 4 if LASTING in kind else 0
        for begin, end in pairwise((0, inner, min(inner + len(LASTING), len(kind)), len(kind))):
            waiting += kind[begin:end]
            if waiting and draw(st.booleans()):
                found.append(Piece(waiting, draw(st.sampled_from((TURNS, 0, 1, 2, 3, 4, 5, 6)))))
                waiting = b""
    return kinds, [*found, Piece(waiting, 0)]


@settings(max_examples=500)
@given(sent=pieces())
@example(sent=([HEAD, LASTING, LASTING, HEAD, LASTING, LASTING], [Piece(HEAD + 2 * LASTING + HEAD, 2), Piece(LASTING, 4), Piece(LASTING, 0)]))  # fmt: skip
@example(sent=([LASTING, BODY, OTHER], [Piece(LASTING, TURNS), Piece(BODY[:-len(LASTING)], TURNS), Piece(LASTING, TURNS), Piece(OTHER, 0)]))  # fmt: skip
@example(sent=([HEAD, HEAD], [Piece(HEAD, TURNS), Piece(HEAD, 0)]))
@example(sent=([LASTING] * 4, [Piece(LASTING * 2, TURNS)] * 2))
@example(sent=([LASTING, INSIDE], [Piece(LASTING, TURNS), Piece(INSIDE[:-len(LASTING)], 3), Piece(LASTING, 0)]))  # fmt: skip
def test_however_requests_come_each_gets_its_own_answer(
    tmp_path_factory: pytest.TempPathFactory, sent: tuple[list[bytes], list[Piece]]
) -> None:
    """In order: cut, several in one piece, one in the body or a header of another."""
    asked, found = sent
    assert b"".join(asked) == b"".join(piece.data for piece in found)

    async def run() -> None:
        async with (
            serving(tmp_path_factory.mktemp("web")) as served,
            connected(served.site) as client,
        ):
            for piece in found:
                client.writer.write(piece.data)
                for _ in range(piece.turns):
                    await asyncio.sleep(0)
            client.writer.write(OTHER)
            others = 0
            for request in [*asked, OTHER]:
                head, body = await client.answer(body=request is not HEAD)
                assert head.startswith(b"HTTP/1.1 200 ")
                if request not in ANSWERS:
                    others += 1
                assert body == ANSWERS.get(request, b"other %d\n" % others)

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(12))
async def test_the_end_of_what_is_remembered(tmp_path: Path, turns: int) -> None:
    """A request that is a byte too long, and another one behind it in the same piece."""
    padding = b"\r\nX: " + b"y" * (LONGEST - len(LASTING) - 4) + b"\r\n\r\n"
    long = LASTING.replace(b"\r\n\r\n", padding)
    assert len(long) == LONGEST + 1
    async with serving(tmp_path) as served, connected(served.site) as client:
        client.writer.write(long + OTHER)
        for _ in range(turns):
            await asyncio.sleep(0)
        client.writer.write(long)
        bodies = [(await client.answer())[1] for _ in range(3)]
        assert bodies == [b"/lasting gzip\n" * 2, b"other 1\n", b"/lasting gzip\n" * 2]
        assert served.asked["/lasting"] == 2


async def test_a_hundred_and_continue_is_said_each_time(tmp_path: Path) -> None:
    """It is part of the answer, which is not kept."""
    async with serving(tmp_path) as served, connected(served.site) as client:
        for number in range(1, 3):
            client.writer.write(EXPECT)
            said = await client.reader.readuntil(b"\r\n\r\n")
            assert said.startswith(b"HTTP/1.1 100 ")
            await client.answer()
            assert served.asked["/lasting"] == number


@pytest.mark.parametrize(
    "config",
    [
        f"basic_auth_users:\n  alice: {HASH}\n",
        "rate_limit:\n  interval: 1ms\n  burst: 1000\n",
    ],
    ids=["passwords", "rate"],
)
async def test_where_somebody_may_be_refused_each_is_looked_at(tmp_path: Path, config: str) -> None:
    """Passwords change, and rates count."""
    name = user("alice", "sesame")["Authorization"].encode()
    request = LASTING.replace(b"\r\n\r\n", b"\r\nAuthorization: " + name + b"\r\n\r\n")
    async with serving(tmp_path, config) as served, connected(served.site) as client:
        for number in range(1, 4):
            await client.ask(request)
            assert served.asked["/lasting"] == number


async def test_a_password_that_comes_is_asked_for_at_once(tmp_path: Path) -> None:
    """Also of a connection that was answered without; and headers that come are there."""
    async with serving(tmp_path, "{}", Limits(tick=0.05)) as served:
        async with connected(served.site) as client:
            assert b"X-Frame-Options" not in (await client.ask(LASTING))[0]
            headers = 'http_server_config:\n  headers:\n    X-Frame-Options: "deny"\n'
            served.site.file.write_text(headers)

            async def has_header() -> bool:
                return b"X-Frame-Options: deny" in (await client.ask(LASTING))[0]

            async with asyncio.timeout(10):
                while not await has_header():
                    await asyncio.sleep(0.05)
            served.site.file.write_text(f"basic_auth_users:\n  alice: {HASH}\n")
            async with asyncio.timeout(10):
                while b" 200 " in (await client.ask(LASTING))[0]:
                    await asyncio.sleep(0.05)
        assert served.site.denied("no_password") == 1


async def test_a_password_that_comes_while_an_answer_is_sent(tmp_path: Path) -> None:
    """What is on its way still arrives, and nobody else gets it."""
    async with serving(tmp_path, "{}", Limits(tick=0.05)) as served, connected(served.site) as slow:
        kept = served.site.front._guard.repeated
        for number in range(1, 1000):
            long = LASTING.replace(b"/lasting", b"/lasting?times=1500&number=%d" % number)
            slow.writer.write(long)
            await until(lambda: served.asked["/lasting"] == number)  # noqa: B023 - waited for
            await asyncio.sleep(0.01)
            if kept.answer(long) is None:
                break
        served.site.file.write_text(f"basic_auth_users:\n  alice: {HASH}\n")
        await until(lambda: bool(served.site.front.current.in_force.config.users))
        for _ in range(number):
            assert (await slow.answer())[0].startswith(b"HTTP/1.1 200 ")

        assert kept.answer(long) is None
        assert (await slow.ask(long))[0].startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n"],
        [b"HEAD /lasting HTTP/1.1\r\nHost: x\r\n\r\n"],
        [LASTING[:20], LASTING[20:]],
        [b"\r\n", LASTING],
        [OTHER],
    ],
)
async def test_an_odd_request_is_not_for_ever(tmp_path: Path, pieces: list[bytes]) -> None:
    """Who sends another one first, or one in two pieces, is answered at once afterwards, too."""
    async with serving(tmp_path) as served, connected(served.site) as client:
        for piece in pieces:
            client.writer.write(piece)
            for _ in range(TURNS):
                await asyncio.sleep(0)
        await client.answer(body=not pieces[0].startswith(b"HEAD"))
        asked = served.asked["/lasting"]
        for _ in range(10):
            await client.ask(LASTING)
        assert served.asked["/lasting"] <= asked + 1


async def test_over_tls(tmp_path: Path) -> None:
    """As without."""
    authority = Authority(tmp_path)
    config = f"tls_server_config:\n  {authority.server()}"
    async with serving(tmp_path, config) as served:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", served.site.port, ssl=authority.client()
        )
        client = Client(reader, writer)
        first = await client.ask(LASTING)
        assert await client.ask(LASTING) == first
        assert served.asked["/lasting"] == 1
        writer.close()


async def test_who_polls_is_not_idle(tmp_path: Path) -> None:
    """Requests that aiohttp does not see do not let it close the connection."""
    limits = Limits(idle=1.0, tick=0.05)
    async with serving(tmp_path, limits=limits) as served, connected(served.site) as client:
        for _ in range(60):
            await client.ask(LASTING)
            await asyncio.sleep(0.02)
        assert 1 < served.asked["/lasting"] < 30
        # Who stops is: as anybody else.
        stopped = time.monotonic()
        assert await client.reader.read() == b""
        assert limits.idle - 0.05 < time.monotonic() - stopped < 10 * limits.idle


async def test_who_takes_no_answers_is_closed(tmp_path: Path) -> None:
    """Nothing is repeated on top of what was not taken: aiohttp waits for that, and has a deadline."""
    limits = Limits(asking=0.4, answering=0.4, idle=1000.0, tick=0.05)
    async with serving(tmp_path, limits=limits) as served:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # One by one, or it would be nothing that could be repeated.
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", served.site.port))
        long = LASTING.replace(b"/lasting", b"/lasting?times=2000")
        with contextlib.suppress(BlockingIOError, ConnectionError):
            for _ in range(2000):
                client.send(long)
                for _ in range(TURNS):
                    await asyncio.sleep(0)
        await until(lambda: served.site.refused("slow") == 1)
        await until(lambda: served.site.front.connections == 0)
        client.close()


async def test_kinds_of_requests_are_bounded(tmp_path: Path) -> None:
    """The oldest goes; those who ask differently each time take no memory."""
    async with serving(tmp_path) as served, connected(served.site) as client:
        kinds = [LASTING.replace(b"gzip", b"g%d" % number) for number in range(MANY + 1)]
        for kind in kinds:
            await client.ask(kind)
        assert served.asked["/lasting"] == MANY + 1
        await client.ask(kinds[-1])
        await client.ask(kinds[1])
        assert served.asked["/lasting"] == MANY + 1
        await client.ask(kinds[0])
        assert served.asked["/lasting"] == MANY + 2


async def test_what_holds_no_more_is_not_kept(tmp_path: Path) -> None:
    """A page is large, and who asked for it may never come again."""
    async with serving(tmp_path) as served, connected(served.site) as client:
        for number in range(5):
            await client.ask(LASTING.replace(b"gzip", b"g%d" % number))
        assert len(served.site.front._guard.repeated._kept) == 5
        served.page[0] += 1
        await client.ask(LASTING)
        assert [*served.site.front._guard.repeated._kept] == [LASTING]


async def test_what_never_holds_takes_no_place(tmp_path: Path) -> None:
    """However many ask for it, others are still repeated."""
    async with (
        serving(tmp_path) as served,
        connected(served.site) as poller,
        connected(served.site) as client,
    ):
        await poller.ask(LASTING)
        for number in range(MANY + 1):
            await client.ask(OTHER.replace(b"/other", b"/fleeting?%d" % number))
        await poller.ask(LASTING)
        assert served.asked["/lasting"] == 1


def test_nothing_is_known_of_what_was_never_asked() -> None:
    """Nor after it was forgotten."""
    repeated = Repeated()
    assert repeated.answer(LASTING) is None
    repeated.forget()
    assert repeated.answer(b"") is None
