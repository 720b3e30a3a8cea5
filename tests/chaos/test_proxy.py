"""The chaos proxy over real sockets: each mode does what it says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from chaos import proxy as chaos_proxy
from chaos.proxy import CUT, Proxy, Streams

Meet = Callable[[], AbstractAsyncContextManager[tuple[Proxy, Streams]]]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say what was said."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture(params=["tcp", "ipc"])
def meet(request: pytest.FixtureRequest, tmp_path: Path) -> Meet:
    """An echo behind a proxy, and a connection to it."""

    @contextlib.asynccontextmanager
    async def run() -> AsyncIterator[tuple[Proxy, Streams]]:
        if request.param == "ipc":
            server = await asyncio.start_unix_server(echo, tmp_path / "far")
            proxy = Proxy(f"ipc://{tmp_path}/near", f"ipc://{tmp_path}/far", 1)
        else:
            server = await asyncio.start_server(echo, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            proxy = Proxy("tcp://127.0.0.1:0", f"tcp://127.0.0.1:{port}", 1)
        await proxy.start()
        async with asyncio.timeout(20):
            streams = await dial(proxy)
            yield proxy, streams
            streams[1].close()
            await proxy.close()
            server.close()

    return run


async def dial(proxy: Proxy) -> Streams:
    """A connection to the proxy."""
    if proxy.near.startswith("ipc://"):
        return await asyncio.open_unix_connection(proxy.near.removeprefix("ipc://"))
    host, _, port = proxy.near.removeprefix("tcp://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def say(streams: Streams, data: bytes) -> bytes:
    """What comes back, up to as much as was said, or to the end."""
    streams[1].write(data)
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        return await streams[0].readexactly(len(data))
    return b""


async def test_it_passes_everything(meet: Meet) -> None:
    """Both ways, however much."""
    async with meet() as (_, streams):
        data = bytes(range(256)) * 400

        assert await say(streams, data) == data


async def test_delay_holds_each_piece_back(meet: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything arrives, and no sooner than the least delay both ways."""
    monkeypatch.setattr(chaos_proxy, "DELAY", (0.05, 0.06))
    async with meet() as (proxy, streams):
        proxy.set("delay")
        loop = asyncio.get_running_loop()
        begin = loop.time()

        assert await say(streams, b"ping") == b"ping"
        assert loop.time() - begin >= 0.1


@pytest.mark.parametrize("mode", ["drop", "reset"])
async def test_a_connection_ends_inside_what_is_said(meet: Meet, mode: chaos_proxy.Mode) -> None:
    """Some bytes come through, never all; the next connection stands."""
    async with meet() as (proxy, streams):
        assert await say(streams, b"x") == b"x"
        proxy.set(mode)
        assert await say(streams, bytes(2 * CUT)) == b""
        assert proxy.counts[f"ended by {mode}"] == 1
        proxy.set("pass")
        again = await dial(proxy)

        assert await say(again, b"ping") == b"ping"
        again[1].close()


async def test_a_reset_is_no_orderly_end(meet: Meet) -> None:
    """Over tcp the peer gets an RST; a Unix socket has none."""
    async with meet() as (proxy, streams):
        assert await say(streams, b"x") == b"x"
        proxy.set("reset")
        streams[1].write(bytes(2 * CUT))
        if proxy.near.startswith("tcp://"):
            with pytest.raises(ConnectionResetError):
                await streams[0].read()
        else:
            assert len(await streams[0].read()) < 2 * CUT


async def test_half_open_swallows_what_is_said_and_stays_deaf(meet: Meet) -> None:
    """Behind bytes that are gone nothing comes through any more; new connections do."""
    async with meet() as (proxy, streams):
        proxy.set("half_open")
        streams[1].write(b"lost")
        while not proxy.counts["swallowed bytes"]:
            await asyncio.sleep(0.005)
        proxy.set("pass")
        streams[1].write(b"more")
        while proxy.counts["swallowed bytes"] < len(b"lostmore"):
            await asyncio.sleep(0.005)
        again = await dial(proxy)

        assert await say(again, b"ping") == b"ping"
        again[1].close()


async def test_throttle_lets_some_bytes_a_second_through(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, in the time they take."""
    monkeypatch.setattr(chaos_proxy, "BYTES_A_SECOND", 100_000)
    async with meet() as (proxy, streams):
        proxy.set("throttle")
        loop = asyncio.get_running_loop()
        begin = loop.time()
        data = bytes(20_000)

        assert await say(streams, data) == data
        assert loop.time() - begin >= 0.2


async def test_refuse_takes_nobody_and_ends_who_is_there(meet: Meet) -> None:
    """Until it passes again."""
    async with meet() as (proxy, streams):
        assert await say(streams, b"x") == b"x"
        proxy.set("refuse")
        assert await streams[0].read() == b""
        refused = await dial(proxy)
        assert await say(refused, b"ping") == b""
        proxy.set("pass")
        again = await dial(proxy)

        assert await say(again, b"ping") == b"ping"
        for one in (refused, again):
            one[1].close()


async def test_the_schedule_follows_the_seed_and_ends_calm(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of one seed do the same."""
    monkeypatch.setattr(chaos_proxy, "HOLD", (0.01, 0.02))
    seen: list[list[str]] = []
    for _ in range(2):
        async with meet() as (proxy, _):
            modes: list[str] = []
            monkeypatch.setattr(proxy, "set", modes.append)
            await proxy.follow(0.2)
            seen.append(modes)

    assert seen[0][-1] == seen[1][-1] == "pass"
    common = min(map(len, seen)) - 1
    assert seen[0][:common] == seen[1][:common]
    assert len(set(seen[0])) > 1
